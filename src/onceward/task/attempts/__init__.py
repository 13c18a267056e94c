"""Attempts: who looks on at them, and how the first one begins in asyncio."""

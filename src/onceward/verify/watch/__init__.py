"""Watches what a consumer does outside its session, and keeps it from reaching the world."""

"""Clients of a boundary."""

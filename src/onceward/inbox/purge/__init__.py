"""Removes dedup records that no delivery can need anymore."""

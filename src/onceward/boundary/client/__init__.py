"""A client of a boundary."""

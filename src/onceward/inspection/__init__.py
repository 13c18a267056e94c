"""Inspect an app from outside: guarantees, counts, balance. Reads only; changes nothing."""

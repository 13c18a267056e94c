"""Benchmarks against bare loops in the same run: `make bench`, or `python -m bench engine sqlite …`.

They are not tests: speed is measured and printed, never asserted.
"""

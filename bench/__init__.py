"""How fast, beside bare loops in the same run. `make bench`, or `python -m bench engine sqlite …`.

Nothing here is a test: speed is measured and shown, never asserted.
"""

"""How attempts at events are committed: one object for an attempt."""

"""How this package speaks to Redis: connections of its own, and each command sent once."""

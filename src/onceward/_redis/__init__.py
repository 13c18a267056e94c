"""How this package talks to Redis: over connections of its own, each command sent once and never retried."""

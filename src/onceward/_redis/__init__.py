"""How this package talks to Redis: over its own connections, sending each command once and never retrying it."""

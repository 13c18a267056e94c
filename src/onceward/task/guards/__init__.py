"""What the engine checks about the middleware of an attempt."""

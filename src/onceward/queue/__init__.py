"""The honest queue on Redis Streams."""

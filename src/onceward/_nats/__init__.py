"""A connection to NATS JetStream, for boundaries and queues."""

"""A boundary on NATS JetStream."""

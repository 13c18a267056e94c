"""The outbox and its relay, killed with -9."""

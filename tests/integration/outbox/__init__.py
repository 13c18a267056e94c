"""The outbox and its relay, on real databases."""

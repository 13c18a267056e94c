"""One database transaction: `DbSession` and `AsyncDbSession`."""

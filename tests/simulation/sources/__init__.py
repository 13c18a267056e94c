"""Sources of messages behind a wire, each with the real connector."""

"""What handlers and factories get for one message."""

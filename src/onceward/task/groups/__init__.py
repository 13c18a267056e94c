"""Groups: transactions whose first attempts are decided by one commit."""

"""What a task class is mixed from."""

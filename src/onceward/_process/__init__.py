"""What concerns the process: its children, its parent, signals, and waits that a stop ends."""

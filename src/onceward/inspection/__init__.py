"""What can be said about an app from outside: guarantees, counts, balance. It reads, and changes nothing."""

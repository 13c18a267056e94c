"""The pages of a run for machines: what they say, and the server of them and of the console."""

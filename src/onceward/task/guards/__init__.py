"""What the engine sees to: that the inbox has recorded an attempt, and that an id is in flight only once."""

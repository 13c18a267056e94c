"""Files that hold messages: whether they are still there, and who may read them."""

"""Where a boundary keeps its facts, cursors and objects."""

"""What a run left: the rows of all tables, and what of them is compared."""

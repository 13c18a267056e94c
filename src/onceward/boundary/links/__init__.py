"""Links between zones: the receiving side pulls, appends, then confirms."""

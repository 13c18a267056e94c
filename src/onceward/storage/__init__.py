"""Tables, and how SQL runs in them: shared by the inbox, dead letters and evidence."""

"""Tables and how to run SQL in them; shared by the inbox, dead letters and evidence."""

-- A partition may take several days. Every row stays where it is: its place is still the day in its id.
SELECT 1;

-- The process that holds a lease. When it is known to be dead, its leases end at once.
ALTER TABLE onceward_attempts ADD COLUMN owner TEXT;

ALTER TABLE onceward_dead_letters ADD COLUMN owner TEXT;

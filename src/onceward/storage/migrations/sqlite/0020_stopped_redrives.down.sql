ALTER TABLE onceward_redrives DROP COLUMN withdrawn;

ALTER TABLE onceward_redrives DROP COLUMN stopped_at;

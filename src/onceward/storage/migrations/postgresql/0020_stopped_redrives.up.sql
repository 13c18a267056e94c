-- When an operator stopped a redrive, and how many of its letters became open again.
ALTER TABLE onceward_redrives ADD COLUMN stopped_at double precision;

ALTER TABLE onceward_redrives ADD COLUMN withdrawn integer NOT NULL DEFAULT 0;

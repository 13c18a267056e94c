-- When an operator stopped a redrive, and how many of its letters became open again.
ALTER TABLE onceward_redrives ADD COLUMN stopped_at REAL;

ALTER TABLE onceward_redrives ADD COLUMN withdrawn INTEGER NOT NULL DEFAULT 0;

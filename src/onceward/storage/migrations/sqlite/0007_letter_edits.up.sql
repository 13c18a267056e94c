-- A corrected payload, to deliver in place of the body. The body stays as it was delivered.
ALTER TABLE onceward_dead_letters ADD COLUMN edited_body BLOB;

ALTER TABLE onceward_dead_letters ADD COLUMN edited_at REAL;

ALTER TABLE onceward_dead_letters ADD COLUMN edited_by TEXT;

ALTER TABLE onceward_dead_letters ADD COLUMN edit_cause TEXT;

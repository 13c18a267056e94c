DROP INDEX onceward_outbox_behind;

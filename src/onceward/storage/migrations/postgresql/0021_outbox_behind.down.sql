DROP FUNCTION onceward_outbox_look();

DROP INDEX onceward_outbox_behind;

DROP TABLE onceward_audit;

DROP TABLE onceward_audit_head;

DROP FUNCTION onceward_audit_refuse;

DROP TABLE onceward_redrive_handouts;

DROP TABLE onceward_redrives;

DROP TABLE onceward_rcas;

DROP TABLE onceward_dead_letters;

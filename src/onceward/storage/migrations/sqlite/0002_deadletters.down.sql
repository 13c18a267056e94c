DROP TRIGGER onceward_audit_is_not_cut;

DROP TRIGGER onceward_audit_is_not_changed;

DROP TABLE onceward_audit;

DROP TABLE onceward_audit_head;

DROP TABLE onceward_redrive_handouts;

DROP TABLE onceward_redrives;

DROP TABLE onceward_rcas;

DROP TABLE onceward_dead_letters;

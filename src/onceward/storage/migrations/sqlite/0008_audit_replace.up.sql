-- INSERT OR REPLACE deletes the row in its way without the triggers for deletes: SQLite fires those only if
-- recursive_triggers is on.
CREATE TRIGGER onceward_audit_is_not_replaced BEFORE INSERT ON onceward_audit
WHEN EXISTS (
    SELECT 1 FROM onceward_audit WHERE seq = NEW.seq OR previous = NEW.previous OR hash = NEW.hash
)
BEGIN
    SELECT RAISE(ABORT, 'the audit is append-only');
END;

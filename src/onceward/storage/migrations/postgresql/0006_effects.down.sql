DROP INDEX onceward_dead_letters_by_event;

UPDATE onceward_dead_letters SET category = 'business' WHERE category = 'in_doubt';

ALTER TABLE onceward_dead_letters
    DROP COLUMN tracking_id,
    DROP COLUMN payload_sha256,
    DROP CONSTRAINT onceward_dead_letters_category_check,
    ADD CONSTRAINT onceward_dead_letters_category_check
        CHECK (category IN ('infrastructure', 'contract', 'business', 'poison'));

UPDATE onceward_effects SET state = 'intended' WHERE state = 'refused';

ALTER TABLE onceward_effects
    DROP COLUMN valid_for,
    DROP COLUMN refusals,
    DROP CONSTRAINT onceward_effects_state_check,
    ADD CONSTRAINT onceward_effects_state_check CHECK (state IN ('intended', 'done'));

-- An effect can be refused, which is certain, and its key can expire at the provider.
ALTER TABLE onceward_effects
    ADD COLUMN valid_for double precision,
    ADD COLUMN refusals bigint NOT NULL DEFAULT 0,
    DROP CONSTRAINT onceward_effects_state_check,
    ADD CONSTRAINT onceward_effects_state_check CHECK (state IN ('intended', 'done', 'refused'));

-- A letter whose effect is in doubt has a category of its own, and every letter names its event: a worker that does it
-- after all resolves the letter in the same transaction.
ALTER TABLE onceward_dead_letters
    ADD COLUMN tracking_id text,
    ADD COLUMN payload_sha256 bytea,
    DROP CONSTRAINT onceward_dead_letters_category_check,
    ADD CONSTRAINT onceward_dead_letters_category_check
        CHECK (category IN ('infrastructure', 'contract', 'business', 'in_doubt', 'poison'));

CREATE INDEX onceward_dead_letters_by_event ON onceward_dead_letters (consumer, tracking_id) WHERE status = 'open';

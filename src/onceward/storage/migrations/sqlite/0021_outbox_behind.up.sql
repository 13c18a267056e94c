-- Messages behind another one of their key, which may be many, among those that are ready, which may be many, too.
CREATE INDEX onceward_outbox_behind ON onceward_outbox (target, key, seq) WHERE state = 'behind';

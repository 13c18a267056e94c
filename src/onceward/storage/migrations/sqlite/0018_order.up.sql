-- Order: the key that a letter holds while it is open or redriven, and what waits behind it.
ALTER TABLE onceward_dead_letters ADD COLUMN order_key TEXT;

CREATE INDEX onceward_dead_letters_by_order_key ON onceward_dead_letters (consumer, id)
    WHERE order_key IS NOT NULL AND status IN ('open', 'redriven');

CREATE TABLE onceward_held_keys (
    consumer TEXT NOT NULL,
    order_key TEXT NOT NULL,
    waiting INTEGER NOT NULL,
    message_ids TEXT NOT NULL,
    noted_at REAL NOT NULL,
    PRIMARY KEY (consumer, order_key)
) WITHOUT ROWID;

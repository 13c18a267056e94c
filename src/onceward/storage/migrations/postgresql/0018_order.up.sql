-- Order: the key that a letter holds while it is open or redriven, and what waits behind it.
ALTER TABLE onceward_dead_letters ADD COLUMN order_key text;

CREATE INDEX onceward_dead_letters_by_order_key ON onceward_dead_letters (consumer, id)
    WHERE order_key IS NOT NULL AND status IN ('open', 'redriven');

CREATE TABLE onceward_held_keys (
    consumer text NOT NULL,
    order_key text NOT NULL,
    waiting bigint NOT NULL,
    message_ids text NOT NULL,
    noted_at double precision NOT NULL,
    PRIMARY KEY (consumer, order_key)
);

DROP TABLE onceward_held_keys;

DROP INDEX onceward_dead_letters_by_order_key;

ALTER TABLE onceward_dead_letters DROP COLUMN order_key;

DROP TABLE onceward_limit_slots;

DROP TABLE onceward_limit_keys;

DROP TABLE onceward_limits;

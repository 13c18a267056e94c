DROP TABLE onceward_holds;

DROP TABLE onceward_horizons;

DROP TABLE onceward_parked;

DROP TABLE onceward_sequences;

DROP TABLE onceward_effects;

DROP TABLE onceward_attempts;

DROP TABLE onceward_dedup;

DROP TABLE onceward_consumers;

DROP TABLE onceward_pauses;

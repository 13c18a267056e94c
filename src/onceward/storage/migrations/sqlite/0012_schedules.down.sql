DROP TABLE onceward_schedules;

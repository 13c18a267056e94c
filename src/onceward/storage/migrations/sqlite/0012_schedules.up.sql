-- How far each schedule has come: its last slot that was published or passed over, in seconds since 1970.
CREATE TABLE onceward_schedules (
    name TEXT PRIMARY KEY,
    last_slot REAL NOT NULL
);

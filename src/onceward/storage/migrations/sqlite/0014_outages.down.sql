DROP TABLE onceward_outages;

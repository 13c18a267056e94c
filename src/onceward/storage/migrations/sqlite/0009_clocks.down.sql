DROP TABLE onceward_clocks;

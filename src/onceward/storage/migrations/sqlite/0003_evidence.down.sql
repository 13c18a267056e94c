DROP TABLE onceward_evidence;

-- Only PostgreSQL has partitions.
SELECT 1;

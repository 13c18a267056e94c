"""A boundary on PostgreSQL."""

"""PostgreSQL: the driver, connections, and one typed function for each SQL statement."""

-- Changes nothing on PostgreSQL, as the way up.
SELECT 1;

-- Changes nothing on PostgreSQL, as on the way up.
SELECT 1;

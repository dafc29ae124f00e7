-- Changes nothing on PostgreSQL: River has this version for SQLite, and records it on every database.
-- One statement, because drivers and migration tools do not take an empty text.
SELECT 1;

-- How many jobs each client may run at once, in the order of its queues, and the ids of those that go on although they
-- were cancelled. Null: it has not said so, as one that is older.
ALTER TABLE /* schema */ riverpy_client ADD COLUMN slots integer[], ADD COLUMN stuck bigint[];

-- The number of jobs that each client may run at once, in the order of its queues, and the ids of its jobs that keep
-- running although they were cancelled. Null: not known, as for an older client.
ALTER TABLE /* schema */ riverpy_client ADD COLUMN slots integer[], ADD COLUMN stuck bigint[];

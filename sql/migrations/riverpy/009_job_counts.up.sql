-- How many attempts ended, and how long jobs waited, by queue and minute. The workers add to the rows of the minute. The
-- leader adds old minutes to rows of hours.
--
-- The queue '' is all queues together, and '*' is the queues beside the busiest ones. The key begins with the period, so
-- that a period is read and deleted as a range. No other index: an addition changes no indexed column and finds room on
-- the same page. The collation makes '' the first row of a period: a session that changes a period locks that row first.
CREATE TABLE /* schema */ riverpy_job_count (
    seconds integer NOT NULL,
    started_at timestamptz NOT NULL,
    queue text COLLATE "C" NOT NULL,
    attempts bigint NOT NULL,
    completed bigint NOT NULL,
    failed bigint NOT NULL,
    discarded bigint NOT NULL,
    wait_seconds float8 NOT NULL,
    wait_max float8 NOT NULL,
    waits_over_100ms bigint NOT NULL,
    waits_over_1s bigint NOT NULL,
    waits_over_10s bigint NOT NULL,
    waits_over_1m bigint NOT NULL,
    waits_over_5m bigint NOT NULL,
    PRIMARY KEY (seconds, started_at, queue),
    CONSTRAINT seconds_known CHECK (seconds IN (60, 3600)),
    CONSTRAINT queue_length CHECK (char_length(queue) <= 128)
) WITH (fillfactor = 70);

-- The databases of a run of pytest: riverpy/_postgres/test_databases.py.
--
-- A name like riverpy_pytest_5_0badcafe_gw0 has the oid of the database that the locks belong to, the number of the run, and
-- what the database is for. CREATE, ALTER and DROP DATABASE take no parameters: the names that start with `a_` are replaced.


-- name: test_database_lock_test_run
-- Each process of a run holds this lock, shared, while databases of the run exist.
select pg_advisory_lock_shared(@namespace, @run);


-- name: test_database_unlock_test_run
select pg_advisory_unlock_shared(@namespace, @run);


-- name: test_database_try_lock_ended_test_run
-- True: no process of the run is alive.
select pg_try_advisory_lock(@namespace, @run);


-- name: test_database_unlock_ended_test_run
select pg_advisory_unlock(@namespace, @run);


-- name: test_database_lock_template
-- One process of a run at a time makes the template.
select pg_advisory_lock(@namespace, @run);


-- name: test_database_unlock_template
select pg_advisory_unlock(@namespace, @run);


-- name: test_database_stay_connected
-- This session is idle for hours. PostgreSQL 13 lacks the setting.
select set_config(name, '0', false) from pg_settings where name = 'idle_session_timeout';


-- name: test_database_oid
select oid::bigint from pg_database where datname = current_database();


-- name: test_database_names
select datname::text from pg_database where starts_with(datname::text, @prefix) order by datname;


-- name: test_database_make
create database a_new_database template template0 encoding 'UTF8';


-- name: test_database_copy
create database a_new_database template a_template_database;


-- name: test_database_refuse_connections
-- CREATE DATABASE cannot copy a database that has connections.
alter database a_template_database with allow_connections false;


-- name: test_database_end_connections
select pg_terminate_backend(pid) from pg_stat_activity where datname = @name and pid <> pg_backend_pid();


-- name: test_database_rename
alter database a_new_database rename to a_template_database;


-- name: test_database_drop
drop database if exists a_new_database with (force);


-- name: test_database_find_kept_tables
-- The tables that have rows now. They keep them.
do $$
declare
    name text;
    has_rows bool;
    kept text[] := '{}';
begin
    for name in
        select oid::regclass::text from pg_class
        where relkind = 'r' and relpersistence <> 't'
          and relnamespace::regnamespace::text !~ '^(pg_|information_schema$)'
    loop
        execute format('select exists (select from %s)', name) into has_rows;
        if has_rows then
            kept := kept || name;
        end if;
    end loop;
    perform set_config('riverpy.kept_tables', kept::text, false);
end
$$;


-- name: test_database_empty_tables
-- DELETE takes much less time than TRUNCATE, which makes new files for a table and each of its indexes. But deleted rows stay
-- in the file, so a table that has grown is truncated, if no other table references it. A table whose rows are referenced by
-- rows of other tables comes after them.
do $$
declare
    name text;
    waiting text[];
    left_over text[] := array(
        select oid::regclass::text from pg_class
        where relkind = 'r' and relpersistence <> 't' and pg_relation_size(oid) > 0
          and relnamespace::regnamespace::text !~ '^(pg_|information_schema$)'
          and oid::regclass::text <> all (current_setting('riverpy.kept_tables')::text[])
        order by oid desc
    );
begin
    perform set_config('lock_timeout', '10s', true);
    while left_over <> '{}' loop
        waiting := left_over;
        left_over := '{}';
        foreach name in array waiting loop
            begin
                if pg_table_size(name::regclass) > 131072
                    and not exists (select from pg_constraint where contype = 'f' and confrelid = name::regclass)
                then
                    execute format('truncate %s', name);
                else
                    execute format('delete from %s', name);
                end if;
            exception when foreign_key_violation then
                left_over := left_over || name;
            end;
        end loop;
        if left_over = waiting then
            execute format('truncate %s cascade', array_to_string(left_over, ', '));
            exit;
        end if;
    end loop;
end
$$;


-- name: test_database_find_filled_tables
-- The tables that have rows, and had none at `record_tables_to_keep` in test_databases.py.
do $$
declare
    name text;
    has_rows bool;
    filled text[] := '{}';
begin
    for name in
        select oid::regclass::text from pg_class
        where relkind = 'r' and relpersistence <> 't' and pg_relation_size(oid) > 0
          and relnamespace::regnamespace::text !~ '^(pg_|information_schema$)'
          and oid::regclass::text <> all (current_setting('riverpy.kept_tables')::text[])
    loop
        execute format('select exists (select from %s)', name) into has_rows;
        if has_rows then
            filled := filled || name;
        end if;
    end loop;
    perform set_config('riverpy.filled_tables', filled::text, false);
end
$$;


-- name: test_database_filled_tables
select unnest(current_setting('riverpy.filled_tables')::text[]);


-- name: test_database_locking_transactions
-- The other sessions of this database with an open transaction that has written, or has locked a table for more than reads.
select pid, xact_start::text as began_at, application_name, state, query
from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and xact_start is not null
  and backend_type = 'client backend'
  and exists (
      select from pg_locks as held
      where held.pid = pg_stat_activity.pid and held.granted
        and held.locktype in ('relation', 'transactionid') and held.mode <> 'AccessShareLock'
  );


-- name: test_database_blocking_sessions
-- The sessions that another session waits for.
select pid, application_name, state, left(query, 300) as query from pg_stat_activity
where pid = any (pg_blocking_pids(@pid)) and backend_type = 'client backend';


-- name: test_database_end_session
select pg_terminate_backend(@pid);


-- name: test_database_mark_test_transaction
-- The mark ends with the transaction. A test that waits for a lock, which another session has forgotten, fails at some time.
select set_config('riverpy.test_transaction', 'open', true), set_config('lock_timeout', '10s', true);


-- name: test_database_transaction_state
-- A session whose transaction has changed a table is not used again: its prepared statements may be for the changed table.
select
    current_setting('riverpy.test_transaction', true) is not distinct from 'open' as is_marked,
    exists (
        select from pg_locks where pid = pg_backend_pid() and locktype = 'relation' and mode = 'AccessExclusiveLock'
    ) as has_changed_tables;


-- name: test_database_reset_session
-- The next test gets the session as if it were new. Its prepared statements stay.
set session authorization default;
reset all;
select pg_advisory_unlock_all();
close all;
unlisten *;
discard temp;
discard sequences;

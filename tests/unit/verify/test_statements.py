"""Which statements on a connection of the handler's own are harmless: those that plainly read."""

from __future__ import annotations

import pytest

from onceward.verify.watch.statements import only_reads

READS = [
    "SELECT 1",
    "select count(*), max(price) FROM orders WHERE id IN (1, 2) AND lower(name) = lower(:name)",
    "  -- the newest\n SELECT * FROM orders ORDER BY at DESC LIMIT 1 FOR UPDATE SKIP LOCKED",
    "SELECT id FROM orders FOR NO KEY UPDATE OF orders",
    "(SELECT 1) UNION ALL (SELECT 2)",
    "VALUES (1), (2)",
    "TABLE orders",
    "WITH recent AS (SELECT * FROM orders), t(a, b) AS (SELECT 1, 2) SELECT sum(total) OVER (ORDER BY id) FROM recent",
    "WITH RECURSIVE tree(id, parent) AS (SELECT 1, 2 UNION ALL SELECT 3, 4) SELECT * FROM tree",
    "SELECT * FROM jsonb_to_recordset(:rows) AS x(id int, total int) WHERE x.id > 1",
    "SELECT 'INSERT INTO orders; DELETE FROM x', $$UPDATE$$, $a$ nextval('x') $a$ FROM orders",
    "SELECT CAST(price AS numeric(10, 2)), price::varchar(3), EXTRACT(year FROM at) FROM orders",
    "SELECT now(), random(), date_trunc('day', at), jsonb_build_object('a', 1), ST_Distance(a, b) FROM places",
    "SELECT pg_catalog.version(), current_schema(), pg_catalog.pg_table_is_visible(c.oid) FROM pg_class c",
    "SELECT pg_advisory_xact_lock(:key)",
    "EXPLAIN SELECT 1",
    "EXPLAIN (ANALYZE, BUFFERS) SELECT count(*) FROM orders",
    "SHOW server_version",
    "SET LOCAL statement_timeout = '1s'",
    "BEGIN",
    "ROLLBACK TO SAVEPOINT a",
    "PRAGMA table_info('orders')",
    "PRAGMA foreign_keys = ON",
    "SELECT 1;",
    "",
]
WRITES = [
    "INSERT INTO orders VALUES (1)",
    "update orders set a = 1",
    "/* SELECT */ DELETE FROM orders",
    "SELECT pg_notify('orders', '1')",
    'SELECT "pg_notify"(:channel, :text)',
    "SELECT pg_catalog.pg_notify('a', 'b')",
    "NOTIFY orders, 'one'",
    "LISTEN orders",
    "SELECT nextval('numbers')",
    "SELECT setval('numbers', 7)",
    "SELECT lo_import('/etc/motd')",
    "SELECT * FROM dblink_exec('host=other', 'INSERT INTO x VALUES (1)')",
    "SELECT charge_card(:id)",
    "SELECT billing.charge(1), count(*) FROM orders",
    "SELECT count(*) FROM orders WHERE log_access(id)",
    "SELECT * INTO copies FROM orders",
    "WITH gone AS (DELETE FROM orders RETURNING *) SELECT * FROM gone",
    "WITH new AS NOT MATERIALIZED (INSERT INTO orders VALUES (1) RETURNING *) SELECT * FROM new",
    "WITH t AS (SELECT 1) INSERT INTO orders SELECT * FROM t",
    "EXPLAIN ANALYZE INSERT INTO orders VALUES (1)",
    "EXPLAIN (ANALYZE) DELETE FROM orders",
    "SELECT 1; DROP TABLE orders",
    "CALL charge(1)",
    "DO $$ BEGIN PERFORM charge(1); END $$",
    "COPY orders TO PROGRAM 'mail'",
    "CREATE TABLE x (id int)",
    "ATTACH DATABASE 'other.db' AS other",
    "REFRESH MATERIALIZED VIEW totals",
    "PRAGMA user_version = 5",
    "VACUUM",
    "TRUNCATE orders",
]


@pytest.mark.req("CC-064")
@pytest.mark.parametrize("statement", READS)
def test_it_only_reads(statement: str) -> None:
    assert only_reads(statement)


@pytest.mark.req("CC-064")
@pytest.mark.parametrize("statement", WRITES)
def test_it_may_change_something(statement: str) -> None:
    assert not only_reads(statement)

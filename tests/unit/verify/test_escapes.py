"""Which statements of a session do something outside its transaction."""

from __future__ import annotations

import pytest

from onceward.verify.watch.escapes import escape_of, in_session

pytestmark = pytest.mark.req("CC-087")

ESCAPES = [
    "COPY orders TO PROGRAM 'mail -s order boss'",
    "copy (SELECT * FROM orders) to\nprogram 'cat'",
    "COPY orders FROM PROGRAM 'curl https://example.com'",
    "COPY (SELECT 1) TO '/tmp/orders.csv' WITH (FORMAT csv)",
    "SELECT lo_export(1, '/tmp/image')",
    "SELECT pg_catalog.pg_file_write('a', 'b', false)",
    "SELECT dblink_exec('dbname=other', 'SELECT 1')",
    "SELECT * FROM dblink('dbname=other', 'INSERT INTO bills VALUES (1) RETURNING 1') AS t(id int)",
    "SELECT * FROM dblink('dbname=other', $$DELETE FROM bills$$) AS t(id int)",
    "SELECT * FROM dblink(:place, :statement) AS t(id int)",
    "SELECT http_post('https://example.com', '{}', 'application/json')",
    "SELECT status FROM http(('POST', 'https://example.com', NULL, 'text/plain', 'x')::http_request)",
    "SELECT aws_lambda.invoke('arn:aws:lambda:x', '{}')",
    "SELECT * FROM aws_s3.query_export_to_s3('SELECT 1', 'bucket')",
    "SELECT pg_background_launch('DELETE FROM bills')",
    "SELECT writefile('/tmp/x', 'y')",
    "SELECT load_extension('mod_spatialite')",
    "VACUUM INTO '/tmp/copy.db'",
    "SELECT 1; COPY orders TO '/tmp/orders'",
    "INSERT INTO remote_bills VALUES (1)",
    "UPDATE ONLY shop.remote_bills SET total = 1",
    'DELETE FROM "remote_bills"',
    "WITH gone AS (DELETE FROM remote_bills RETURNING id) SELECT * FROM gone",
    "CREATE OR REPLACE TEMP VIEW seen AS SELECT 1 AS one",
    "CREATE TEMPORARY RECURSIVE VIEW seen (n) AS SELECT 1",
    "CREATE OR REPLACE TEMP RECURSIVE VIEW seen (n) AS SELECT 1",
    "CREATE OR REPLACE VIEW pg_temp.seen AS SELECT 1",
]
INSIDE = [
    "INSERT INTO bills VALUES ('COPY x TO PROGRAM', 'dblink_exec(1)')",
    "COPY orders TO STDOUT",
    "COPY orders FROM STDIN",
    "COPY orders FROM '/srv/prices.csv'",
    "SELECT pg_notify('orders', 'new')",
    "NOTIFY orders",
    "SELECT * FROM dblink('dbname=other', 'SELECT id FROM bills') AS t(id int)",
    "SELECT * FROM remote_bills",
    "INSERT INTO bills SELECT * FROM remote_bills",
    "SELECT net.http_post('https://example.com')",
    "SELECT http FROM protocols",
    "SELECT * FROM http(('GET', 'https://example.com', NULL, NULL, NULL)::http_request)",
    "SELECT aws_s3.table_import_from_s3('bills', '', '(format csv)', 'bucket', 'file')",
    "UPDATE copies SET program = 'x' WHERE edit = 1",
    "/* COPY orders TO PROGRAM 'x' */ SELECT 1 -- dblink_exec('a')",
    "ATTACH ':memory:' AS scratch",
    "INSERT INTO scratch.bills VALUES (1)",
    "ATTACH DATABASE 'prices.db' AS prices",
    "SELECT * FROM prices.items",
]


@pytest.mark.parametrize("sql", ESCAPES)
def test_these_are_outside(sql: str) -> None:
    with in_session():
        assert escape_of(sql, lambda: {"remote_bills"}) is not None
    assert escape_of(sql, lambda: {"remote_bills"}) is None, "on a connection of its own, it is found as such"


def test_these_are_inside() -> None:
    with in_session():
        assert [sql for sql in INSIDE if escape_of(sql, lambda: {"remote_bills"})] == []


@pytest.mark.parametrize("sql", ["INSERT INTO archive.bills VALUES (1)", "CREATE TABLE archive.bills (id)"])
def test_writes_to_an_attached_file_are_outside(sql: str) -> None:
    with in_session():
        assert escape_of("ATTACH DATABASE :path AS archive", set) is None
        escape = escape_of(sql, set)
    assert escape is not None
    assert "'archive'" in escape.what

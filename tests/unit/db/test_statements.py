"""Running SQL in a session: strings and constructs, parameters, rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import DDL, JSON, bindparam, column, insert, literal_column, select, table, text, update
from sqlalchemy.exc import StatementError

from onceward.db import RowError, SessionError

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

ORDERS = table("orders", column("id"), column("item"))
INSERT = "INSERT INTO orders (id, item) VALUES (:id, :item)"
ROWS = [{"id": 1, "item": "tea"}, {"id": 2, "item": "rice"}, {"id": 3, "item": "tea"}]


@pytest.fixture
def stocked(database: Database) -> Database:
    database.do("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
    with database.session() as session:
        session.execute(INSERT, ROWS)
    return database


COUNTED: list[tuple[Any, int]] = [
    ("UPDATE orders SET item = 'x' WHERE item = 'tea'", 2),
    ("DELETE FROM orders WHERE id > 9", 0),
    (update(ORDERS).where(ORDERS.c.id < 3).values(item="x"), 2),
    (insert(ORDERS).values(id=4, item="salt"), 1),
    (text("DELETE FROM orders"), 4),
]


def test_execute_returns_how_many_rows_it_affected(stocked: Database) -> None:
    with stocked.session() as session:
        for statement, count in COUNTED:
            assert session.execute(statement) == count


@pytest.mark.parametrize("statement", [INSERT, insert(ORDERS)], ids=["text", "construct"])
def test_a_sequence_of_dicts_runs_the_statement_for_each(stocked: Database, statement: Any) -> None:
    with stocked.session() as session:
        assert session.execute(statement, [{"id": 4, "item": "a"}, {"id": 5, "item": "b"}]) == 2
        assert session.execute_scalar("SELECT count(*) FROM orders") == 5


def test_a_text_keeps_the_types_and_values_that_it_was_given(stocked: Database) -> None:
    with stocked.session() as session:
        typed = text(INSERT).bindparams(bindparam("item", type_=JSON(none_as_null=True)))
        assert session.execute(typed, {"id": 4, "item": {"name": "salt"}}) == 1
        assert session.execute(text(INSERT).bindparams(item="oil"), {"id": 5}) == 1
        found = session.fetch_all("SELECT item FROM orders WHERE id > 3 ORDER BY id")
    assert [row["item"] for row in found] == ['{"name": "salt"}', "oil"]


def test_an_empty_sequence_runs_nothing(stocked: Database) -> None:
    with stocked.session() as session:
        assert session.execute("DELETE FROM orders", []) == 0
        assert session.execute("DELETE FROM orders", ()) == 0
        assert session.execute_scalar("SELECT count(*) FROM orders") == 3
        assert session.execute("DELETE FROM orders", {}) == 3


def test_a_parameter_is_data_and_never_sql(stocked: Database) -> None:
    hostile = "x'; DROP TABLE orders; --"
    with stocked.session() as session:
        session.execute(INSERT, {"id": 4, "item": hostile})
        assert session.execute_scalar("SELECT item FROM orders WHERE id = :id", {"id": 4}) == hostile


def test_a_missing_parameter_is_an_error(stocked: Database) -> None:
    with stocked.session() as session, pytest.raises(StatementError, match="item"):
        session.execute(INSERT, {"id": 4})


def test_execute_scalar_gives_the_first_column_of_the_first_row_or_none(stocked: Database) -> None:
    with stocked.session() as session:
        assert session.execute_scalar("SELECT item, id FROM orders ORDER BY id") == "tea"
        assert session.execute_scalar(select(ORDERS.c.item).where(ORDERS.c.id == 2)) == "rice"
        assert session.execute_scalar("SELECT id FROM orders WHERE id = 9") is None
        assert session.execute_scalar(INSERT + " RETURNING id", {"id": 4, "item": "salt"}) == 4
    assert stocked.scalar("SELECT count(*) FROM orders") == 4


def test_fetch_one_gives_a_dict_or_none(stocked: Database) -> None:
    with stocked.session() as session:
        assert session.fetch_one("SELECT * FROM orders WHERE id = :id", {"id": 2}) == {
            "id": 2,
            "item": "rice",
        }
        assert session.fetch_one(select(ORDERS).where(ORDERS.c.id == 1)) == {"id": 1, "item": "tea"}
        assert session.fetch_one("SELECT * FROM orders WHERE id = 9") is None


def test_fetch_one_refuses_more_than_one_row_and_the_session_goes_on(stocked: Database) -> None:
    with stocked.session() as session:
        with pytest.raises(RowError, match=r"more than one row.*fetch_all"):
            session.fetch_one("SELECT * FROM orders")
        assert session.execute("DELETE FROM orders") == 3
    assert session.committed


def test_fetch_all_gives_every_row_in_order(stocked: Database) -> None:
    with stocked.session() as session:
        assert session.fetch_all("SELECT * FROM orders ORDER BY id") == ROWS
        assert session.fetch_all(select(ORDERS.c.id).where(ORDERS.c.item == "none")) == []


def test_two_columns_of_one_name_are_refused_instead_of_losing_one(stocked: Database) -> None:
    query = "SELECT a.id, b.id FROM orders a JOIN orders b ON b.id = a.id + 1"
    with stocked.session() as session:
        with pytest.raises(RowError, match="alias"):
            session.fetch_all(query)
        assert len(session.fetch_all(query.replace("b.id FROM", "b.id AS next FROM"))) == 2


ENDING = ["COMMIT", " commit;", "ROLLBACK", "rollback work", "BEGIN", "START TRANSACTION", "END"]


@pytest.mark.req("QC-14")
def test_a_statement_cannot_end_the_transaction_behind_the_sessions_back(stocked: Database) -> None:
    with pytest.raises(ZeroDivisionError), stocked.session() as session:  # noqa: PT012
        session.execute("DELETE FROM orders")
        for statement in [*ENDING, "-- a\n/* b */ COMMIT", text("Commit")]:
            with pytest.raises(SessionError, match="leave the block to commit, raise to roll back"):
                session.execute(statement)
        raise ZeroDivisionError
    assert stocked.scalar("SELECT count(*) FROM orders") == 3


ENDS = [
    ";commit",
    "UPDATE orders SET item = 'x'; commit",
    "/* x */ ; -- y\n COMMIT",
    "SELECT 'a;b'; ROLLBACK",
    "SELECT $$;$$; commit",
    "INSERT INTO orders VALUES (9, 'it''s'); end",
    "CREATE TRIGGER t AFTER INSERT ON orders BEGIN DELETE FROM orders; END; COMMIT",
    "\ufeffCOMMIT",
    "ROLLBACK AND CHAIN",
    "PREPARE/**/TRANSACTION 'a'",
    text("SELECT 1; commit").columns(column("x")),
    select(text("1; commit")),
    select(literal_column("1; commit")),
    insert(ORDERS).values(id=9, item="x").prefix_with("; commit --"),
    DDL("COMMIT"),
    DDL("DROP TABLE orders; commit"),
    text("begin"),
]


@pytest.mark.req("QC-14")
@pytest.mark.parametrize("statement", ENDS, ids=map(str, range(len(ENDS))))
def test_no_text_ends_the_transaction_wherever_it_says_so(stocked: Database, statement: Any) -> None:
    with stocked.session() as session:
        session.execute("DELETE FROM orders WHERE id = 1")
        with pytest.raises(SessionError, match="leave the block to commit, raise to roll back"):
            session.execute(statement)
        assert session.execute_scalar("SELECT count(*) FROM orders") == 2


ENDS_ON_POSTGRESQL = [
    "/* a /* b */ ' */ commit --'",
    "SELECT 1; /* /* */ */ ABORT",
    "-- a\rCOMMIT",
    "SELECT 1 -- '\r; COMMIT -- '",
    "SELECT 1 ` ; COMMIT -- `",
    "SELECT 1 [ ; COMMIT -- ]",
    "CREATE FUNCTION begin() RETURNS int LANGUAGE sql AS 'select 1'; END",
    "CREATE TRIGGER t AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION f(); END",
    "CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; END; END",
]


@pytest.mark.req("QC-14")
@pytest.mark.parametrize("statement", ENDS_ON_POSTGRESQL, ids=map(str, range(len(ENDS_ON_POSTGRESQL))))
def test_a_text_is_read_as_postgresql_reads_it(postgresql: Database, statement: str) -> None:
    with (
        postgresql.session() as session,
        pytest.raises(SessionError, match="leave the block to commit, raise to roll back"),
    ):
        session.execute(statement)


def test_a_function_has_statements_of_its_own(postgresql: Database) -> None:
    with postgresql.session() as session:
        session.execute(
            "CREATE FUNCTION two() RETURNS int BEGIN ATOMIC SELECT 1; SELECT CASE 1 WHEN 1 THEN 2 END; END"
        )
        session.execute("CREATE FUNCTION three() RETURNS int LANGUAGE plpgsql AS $$BEGIN RETURN 3; END$$")
        assert session.execute_scalar("SELECT two() + three() /* ; /* commit */ ; */") == 5


@pytest.mark.req("QC-14")
def test_several_statements_in_one_text_are_refused(stocked: Database) -> None:
    with (
        stocked.session() as session,
        pytest.raises(SessionError, match="one statement at a time, and this text has 2"),
    ):
        session.execute("DELETE FROM orders; DELETE FROM orders")


@pytest.mark.parametrize(
    ("sql", "answer"),
    [
        (" ; SELECT ';commit' ;", ";commit"),
        ("SELECT 'x' /* ; commit */ -- ; commit", "x"),
        ("SELECT CASE WHEN 1 = 1 THEN 'x' END", "x"),
        ('SELECT max(item) AS "a;commit" FROM orders', "tea"),
    ],
)
def test_words_in_strings_names_and_comments_are_harmless(stocked: Database, sql: str, answer: str) -> None:
    with stocked.session() as session:
        assert session.execute_scalar(sql) == answer


def test_names_in_brackets_are_harmless(sqlite: Database) -> None:
    with sqlite.session() as session:
        assert session.fetch_one("SELECT 1 AS [a;commit], 2 AS `b;end`") == {"a;commit": 1, "b;end": 2}


def test_a_trigger_has_statements_of_its_own(sqlite: Database) -> None:
    sqlite.do("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
    with sqlite.session() as session:
        session.execute(INSERT, ROWS)
        session.execute("CREATE TRIGGER t AFTER DELETE ON orders BEGIN DELETE FROM orders; SELECT 1; END")
        session.execute("DELETE FROM orders WHERE id = 1")
        assert session.execute_scalar("SELECT count(*) FROM orders") == 0


def test_a_connection_keeps_a_cursor_for_each_text_but_not_its_rows(postgresql: Database) -> None:
    with postgresql.session() as session:
        session.execute("CREATE TEMPORARY TABLE numbers (n INTEGER) ON COMMIT DROP")
        cursors = session.run(lambda transaction: transaction.connection.info["onceward_cursors"]._cursors)
        before = len(cursors)
        for n in range(3):
            session.execute("INSERT INTO numbers VALUES (:n)", {"n": n})
        assert len(cursors) == before + 1
        assert session.execute("SELECT n FROM numbers") == 3
        assert len(cursors) == before + 1

"""`occ_update`: an update counts only if the row has not changed since it was read; a retry needs a new session."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table, func

from onceward.db import OptimisticConflict, RetryRefusedError, RowError, SessionError
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

STOCK = Table("stock", MetaData(), Column("id", Integer), Column("item", String), Column("version", Integer))


@pytest.fixture
def stock(database: Database) -> Database:
    database.do(
        "CREATE TABLE stock (id INTEGER PRIMARY KEY, item TEXT, amount INTEGER, version INTEGER NOT NULL)",
        "INSERT INTO stock VALUES (1, 'tea', 10, 1), (2, 'rice', 10, 1)",
    )
    return database


@pytest.mark.parametrize("where", ["stock", STOCK], ids=["name", "Table"])
def test_an_update_at_the_expected_version_returns_the_next_one(stock: Database, where: Any) -> None:
    with stock.session() as session:
        assert session.occ_update(where, {"id": 1}, {"item": "mint"}, expected=1) == 2
        assert session.occ_update(where, {"id": 1}, {"item": "sage"}, expected=2) == 3
    with stock.session() as session:
        row = session.fetch_one("SELECT * FROM stock WHERE id = 1")
        assert row == {"id": 1, "item": "sage", "amount": 10, "version": 3}
        assert session.execute_scalar("SELECT version FROM stock WHERE id = 2") == 1


@pytest.mark.parametrize(("key", "expected"), [({"id": 1}, 7), ({"id": 9}, 1)], ids=["other version", "gone"])
def test_another_version_or_no_row_is_a_conflict_and_changes_nothing(
    stock: Database, key: dict[str, int], expected: int
) -> None:
    with pytest.raises(OptimisticConflict, match="open a new session and read again") as caught:  # noqa: SIM117
        with stock.session() as session:
            session.occ_update("stock", key, {"amount": 0}, expected=expected)
    assert (caught.value.table, caught.value.key, caught.value.expected) == ("stock", key, expected)
    assert stock.scalar("SELECT sum(amount) FROM stock") == 20


@pytest.mark.req("QC-14")
def test_a_retry_inside_the_session_is_refused_and_says_open_a_new_one(stock: Database) -> None:
    with stock.session() as session:
        with pytest.raises(OptimisticConflict):
            session.occ_update("stock", {"id": 1}, {"amount": 0}, expected=7)
        for key in ({"id": 1}, {"id": 2}):  # the right version, but another row
            with pytest.raises(RetryRefusedError, match="open a new session and read again"):
                session.occ_update("stock", key, {"amount": 0}, expected=1)
        session.execute("UPDATE stock SET item = 'seen' WHERE id = 2")
    assert issubclass(RetryRefusedError, SessionError)
    assert stock.scalar("SELECT sum(amount) FROM stock") == 20
    assert stock.scalar("SELECT item FROM stock WHERE id = 2") == "seen"
    with stock.session() as session:
        assert session.occ_update("stock", {"id": 1}, {"amount": 0}, expected=1) == 2


def test_of_two_who_read_the_same_version_the_second_is_reported(postgresql: Database) -> None:
    postgresql.do("CREATE TABLE stock (id INTEGER PRIMARY KEY, amount INTEGER, version INTEGER)")
    postgresql.do("INSERT INTO stock VALUES (1, 10, 1)")
    with postgresql.session() as slow:
        seen = slow.fetch_one("SELECT * FROM stock")
        with postgresql.session() as quick:
            quick.occ_update("stock", {"id": 1}, {"amount": 9}, expected=seen["version"])
        with pytest.raises(OptimisticConflict):
            slow.occ_update("stock", {"id": 1}, {"amount": 8}, expected=seen["version"])
    assert postgresql.scalar("SELECT amount FROM stock") == 9


AWKWARD = ["id_value", "id_1", "version_1", "key0", "key_0", "param_1", "where", "Mixed Case", "expected"]


def test_column_names_do_not_meet_the_names_of_parameters(database: Database) -> None:
    for number, name in enumerate(AWKWARD):
        with database.session() as session:
            session.execute(f'CREATE TABLE t{number} (id INTEGER, "{name}" INTEGER, version INTEGER)')
            session.execute(f"INSERT INTO t{number} VALUES (1, 10, 1)")
            assert session.occ_update(f"t{number}", {"id": 1}, {name: 11}, expected=1) == 2
            key = {"id": 1, name: 11}
            assert session.occ_update(f"t{number}", key, {"id": 1, name: 12}, expected=2) == 3
            assert session.fetch_one(f"SELECT * FROM t{number}") == {"id": 1, name: 12, "version": 3}


def test_a_conflict_pickles() -> None:
    conflict = pickle.loads(pickle.dumps(OptimisticConflict("stock", {"id": 1}, 7)))
    assert (conflict.table, conflict.key, conflict.expected) == ("stock", {"id": 1}, 7)
    assert "the row of stock with this id is not at version 7" in str(conflict)


def test_the_version_column_can_have_another_name(database: Database) -> None:
    database.do("CREATE TABLE t (id INTEGER, revision INTEGER)", "INSERT INTO t VALUES (1, 4)")
    with database.session() as session:
        assert session.occ_update("t", {"id": 1}, {}, expected=4, version_column="revision") == 5


def test_a_value_can_be_an_expression(stock: Database) -> None:
    with stock.session() as session:
        session.occ_update("stock", {"id": 1}, {"item": func.upper("tea")}, expected=1)
        assert session.execute_scalar("SELECT item FROM stock WHERE id = 1") == "TEA"


def test_a_key_of_many_rows_can_only_be_rolled_back(stock: Database) -> None:
    with pytest.raises(SessionError, match="nothing was committed"):  # noqa: PT012, SIM117
        with stock.session() as session:
            with pytest.raises(RowError, match="names 2 rows"):
                session.occ_update("stock", {"amount": 10}, {"amount": 0}, expected=1)
    assert stock.scalar("SELECT sum(amount) FROM stock") == 20


def test_a_call_without_key_or_with_a_version_of_its_own_is_refused(stock: Database) -> None:
    with stock.session() as session:
        for key, values in [({}, {"amount": 0}), ({"id": 1}, {"version": 9}), ({"id": 1, "version": 1}, {})]:
            with pytest.raises(ConfigurationError, match="the key of one row"):
                session.occ_update("stock", key, values, expected=1)

"""The file of a SQLite database, deleted or replaced while sessions use it."""

# ruff: noqa: PT012  leaving the block is what is tested, so it is inside `raises`

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool, StaticPool

from onceward.db import AsyncDbSession, DbSession
from onceward.errors import FileLostError
from tests.support.lost_files import (
    Change,
    every_harmless_change,
    every_loss,
    every_wal_loss,
    every_wal_loss_meanwhile,
)

INSERT = "INSERT INTO orders VALUES (1)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "app.db"


def prepared(path: Path, journal: str = "wal", **options: Any) -> Any:
    engine = create_engine(f"sqlite:///{path}", **options)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA journal_mode = {journal}")
    with DbSession(engine) as session:
        session.execute("CREATE TABLE orders (id INTEGER)")
    return engine


@pytest.mark.req("RN-08")
@every_wal_loss
def test_a_session_does_not_begin_on_a_lost_file(path: Path, lose: Change) -> None:
    engine = prepared(path)
    lose(path)
    with (
        pytest.raises(FileLostError, match=r"app\.db.* (deleted|replaced|emptied|cut)"),
        DbSession(engine) as session,
    ):
        session.execute(INSERT)
    engine.dispose()


@pytest.mark.req("RN-08")
@every_loss
@pytest.mark.parametrize("options", [{}, {"poolclass": NullPool}], ids=["pool", "no pool"])
def test_a_loss_is_noticed_in_every_journal_mode_and_pool(
    path: Path, lose: Change, options: dict[str, Any]
) -> None:
    engine = prepared(path, "delete", **options)
    lose(path)
    there = path.exists()
    with pytest.raises(FileLostError), DbSession(engine) as session:
        session.execute(INSERT)
    assert path.exists() == there
    engine.dispose()


@pytest.mark.req("RN-08")
@every_wal_loss_meanwhile
def test_a_session_does_not_say_that_it_committed_to_a_lost_file(path: Path, lose: Change) -> None:
    engine = prepared(path)
    with pytest.raises(FileLostError), DbSession(engine) as session:
        session.execute(INSERT)
        lose(path)
    assert not session.committed
    engine.dispose()


@pytest.mark.req("RN-08")
@every_wal_loss
def test_a_loss_is_noticed_in_asyncio(path: Path, lose: Change) -> None:
    prepared(path).dispose()

    async def body() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
        try:
            async with AsyncDbSession(engine) as session:
                await session.execute(INSERT)
            lose(path)
            with pytest.raises(FileLostError):
                async with AsyncDbSession(engine) as session:
                    await session.execute(INSERT)
        finally:
            await engine.dispose()

    asyncio.run(body())


@pytest.mark.req("RN-08")
@every_harmless_change
def test_other_changes_of_the_file_are_no_loss(path: Path, change: Change) -> None:
    engine = prepared(path)
    change(path)
    with DbSession(engine) as session:
        session.execute(INSERT)
    assert session.committed
    engine.dispose()


@pytest.mark.req("RN-08")
@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file:shared?mode=memory&cache=shared&uri=true"]
)
def test_a_database_in_memory_has_no_file_to_lose(url: str) -> None:
    engine = create_engine(url, poolclass=StaticPool)
    for _ in range(2):
        with DbSession(engine) as session:
            session.execute("SELECT 1")
        assert session.committed
    engine.dispose()


@pytest.mark.req("RN-08")
def test_a_uri_names_a_file_that_can_be_lost(path: Path) -> None:
    prepared(path).dispose()
    engine = create_engine(f"sqlite:///file:{path}?mode=rw&uri=true")
    with DbSession(engine) as session:
        session.execute(INSERT)
    path.unlink()
    with pytest.raises(FileLostError), DbSession(engine) as session:
        session.execute(INSERT)
    engine.dispose()


@pytest.mark.req("RN-08")
def test_a_symlink_that_leads_elsewhere_is_a_loss(path: Path) -> None:
    prepared(path).dispose()
    link = path.with_name("link.db")
    link.symlink_to(path)
    engine = create_engine(f"sqlite:///{link}")
    with DbSession(engine) as session:
        session.execute(INSERT)
    link.unlink()
    link.symlink_to(path.with_name("other.db"))
    path.with_name("other.db").touch()
    with pytest.raises(FileLostError), DbSession(engine) as session:
        session.execute(INSERT)
    engine.dispose()


@pytest.mark.req("RN-08")
def test_an_engine_that_was_disposed_of_may_use_another_file(path: Path) -> None:
    engine = prepared(path)
    engine.dispose()
    path.unlink()
    prepared(path).dispose()
    with DbSession(engine) as session:
        session.execute(INSERT)
    assert session.committed
    engine.dispose()

"""Files with messages in them are their owner's alone, whatever the umask, and nothing planted is followed."""

# ruff: noqa: PT012  leaving the block is what is tested, so it is inside `raises`

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import StaticPool

from onceward import Onceward, Transaction
from onceward._files import private
from onceward._files.private import NewFile, create_file, make_directory
from onceward.boundary.artifacts import Landing
from onceward.boundary.store import NewFact
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.connectors import SqliteConnector
from onceward.demo import journal
from onceward.inbox import AsyncInbox, Inbox
from onceward.telemetry.span_exporter import SpanFileExporter

pytestmark = pytest.mark.req("RN-10")


@pytest.fixture(autouse=True, params=[0o000, 0o022, 0o777], ids=oct)
def _umask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Of all files and directories below it that are not as they should be."""
    found = {each: stat.S_IMODE(each.lstat().st_mode) for each in folder.rglob("*") if not each.is_symlink()}
    assert found
    return {
        str(each.relative_to(folder)): mode
        for each, mode in found.items()
        if mode != (0o700 if each.is_dir() else 0o600)
    }


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_queue_and_the_files_beside_it_are_private(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "far.db")  # SQLite creates what it leads to
    with SqliteConnector(tmp_path / "queue.db") as queue, SqliteConnector(tmp_path / "link.db") as linked:
        for each in (queue, linked):
            each.dispatch_transactions([Transaction("a")])
        assert sorted(each.name for each in tmp_path.iterdir()) == [
            *("far.db", "far.db-shm", "far.db-wal", "link.db"),
            *("queue.db", "queue.db-shm", "queue.db-wal"),
        ]
        assert modes(tmp_path) == {}


def test_the_database_of_an_inbox_is_private(tmp_path: Path) -> None:
    async def migrate() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/asyncio.db")
        await AsyncInbox(engine).migrate()
        await engine.dispose()

    asyncio.run(migrate())
    for url in (f"{tmp_path}/plain.db", f"file:{tmp_path}/a%20uri.db?uri=true"):
        engine = create_engine(f"sqlite:///{url}")
        Inbox(engine).migrate()
        engine.dispose()
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/app.db")
    engine = app.create_engine()
    engine.connect().close()
    engine.dispose()
    assert {each.name for each in tmp_path.iterdir()} == {"asyncio.db", "plain.db", "a uri.db", "app.db"}
    assert modes(tmp_path) == {}


def test_an_inbox_creates_no_file_for_a_database_in_memory_or_that_is_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("", "/:memory:", "/file:shared?mode=memory&cache=shared&uri=true"):
        engine = create_engine(f"sqlite://{url}", poolclass=StaticPool)
        Inbox(engine).migrate()
        engine.dispose()
    missing = create_engine("sqlite:///file:missing.db?mode=rw&uri=true")
    with pytest.raises(Exception, match="unable to open"):
        Inbox(missing).migrate()
    missing.dispose()
    assert list(tmp_path.iterdir()) == []


def test_a_boundary_and_its_artifacts_are_private(tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"an artifact"

    async def body() -> None:
        store = SqliteBoundaryStore(tmp_path / "new" / "data")
        await store.append(NewFact("a", b"digest", b"record"))
        await store.objects.put("bucket", "key", pieces(), "text/plain")
        assert modes(tmp_path) == {}
        await store.close()

    asyncio.run(body())


def test_fetched_artifacts_bundles_spans_and_journals_are_private(tmp_path: Path) -> None:
    landing = Landing(tmp_path / "artifact")
    landing.write(b"content")
    landing.keep()
    SpanFileExporter(tmp_path / "new" / "folder" / "spans.jsonl").export([])
    journal.create(tmp_path / "journal.db", "CREATE TABLE t (x)")
    assert modes(tmp_path) == {}


def test_what_exists_keeps_its_mode(tmp_path: Path) -> None:
    data, queue = tmp_path / "data", tmp_path / "queue.db"
    data.mkdir()
    data.chmod(0o755)
    queue.touch()
    queue.chmod(0o644)
    make_directory(data)
    create_file(queue)
    with SqliteConnector(queue) as connector:
        connector.dispatch_transactions([Transaction("a")])
        assert mode_of(tmp_path / "queue.db-wal") == 0o644
    with NewFile(queue, replace=True) as file:
        file.write(b"other")
    assert (mode_of(data), mode_of(queue)) == (0o755, 0o644)


def test_a_public_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    with NewFile(tmp_path / "report.xml", replace=True, public=True) as file:
        file.write(b"<?xml")
    assert mode_of(tmp_path / "report.xml") == 0o666 & ~umask


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_new_file_replaces_nothing_unless_it_is_asked_to(
    tmp_path: Path, hard_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hard_links:
        monkeypatch.setattr(private.os, "link", _refuse)
    place, target = tmp_path / "export", tmp_path / "target"
    with NewFile(place) as file:
        file.write(b"first")
    place.chmod(0o600)
    with pytest.raises(FileExistsError), NewFile(place):
        raise AssertionError("nothing is done for a file that exists")
    place.unlink()
    with pytest.raises(FileExistsError), NewFile(place) as file:  # planted while it is written
        place.symlink_to(target)
        file.write(b"second")
    with pytest.raises(FileExistsError), NewFile(place):
        pass
    assert not target.exists()
    with NewFile(place, replace=True) as file:
        file.write(b"third")
    assert not place.is_symlink()
    assert [each.name for each in tmp_path.iterdir()] == ["export"]


def test_a_file_that_could_not_be_completed_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), NewFile(tmp_path / "export") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def _refuse(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_a_place_where_no_directory_can_be_made_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        make_directory("/proc/nothing-can-be-made-here/data")

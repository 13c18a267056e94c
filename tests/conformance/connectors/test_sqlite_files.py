"""The file of a SQLite queue: deleted or replaced while it is open."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from onceward.connectors import AsyncSqliteConnector, SqliteConnector
from onceward.errors import FileLostError
from onceward.transaction import Settlement, Transaction, Verdict
from tests.support.lost_files import Change, every_harmless_change, every_wal_loss


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "queue.db"


@pytest.mark.req("RN-08")
@every_wal_loss
def test_a_lost_file_takes_no_message_and_no_outcome(path: Path, lose: Change) -> None:
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([Transaction("a"), Transaction("b")])
        [transaction] = queue.fetch_transactions(1)
        lose(path)
        with pytest.raises(FileLostError, match=r"queue\.db.* (deleted|replaced|emptied|cut)"):
            queue.dispatch_transactions([Transaction("c")])
        with pytest.raises(FileLostError):
            queue.fetch_transactions(1)
        with pytest.raises(FileLostError):
            queue.settle_transactions([Settlement(transaction, Verdict.DONE)])
        with pytest.raises(FileLostError):
            queue.extend_transactions([transaction])


@pytest.mark.req("RN-08")
def test_a_file_that_is_cut_by_a_few_pages_is_noticed(path: Path) -> None:
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([Transaction("x" * 1000) for _ in range(200)])
        with closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA wal_checkpoint").fetchall()
        queue.dispatch_transactions([Transaction("y")])
        os.truncate(path, path.stat().st_size - 3 * 4096)
        for _ in range(2):
            with pytest.raises(FileLostError, match=r"queue\.db was cut"):
                queue.dispatch_transactions([Transaction("z")])


@pytest.mark.req("RN-08")
def test_the_message_says_what_to_do(path: Path) -> None:
    with SqliteConnector(path) as queue:
        path.unlink()
        with pytest.raises(FileLostError) as caught:
            queue.fetch_transactions(1)
    assert str(caught.value) == (
        f"{path} was deleted or moved while it was open. Nothing more is acknowledged: this process has the old file, "
        "and what it writes there is lost. Put the file back in its place, or restart the process to use what is "
        "there now"
    )


@pytest.mark.req("RN-08")
@every_wal_loss
def test_a_lost_file_is_noticed_in_asyncio(path: Path, lose: Change) -> None:
    async def body() -> None:
        async with AsyncSqliteConnector(path) as queue:
            await queue.dispatch_transactions_async([Transaction("a")])
            lose(path)
            with pytest.raises(FileLostError):
                await queue.dispatch_transactions_async([Transaction("b")])

    asyncio.run(body())


@pytest.mark.req("RN-08")
@every_harmless_change
def test_other_changes_of_the_file_are_no_loss(path: Path, change: Change) -> None:
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([Transaction("a")])
        change(path)
        queue.dispatch_transactions([Transaction("b")])
        assert queue.counts()["ready"] == 2


@pytest.mark.req("RN-08")
def test_a_file_that_is_put_back_is_used_again(path: Path) -> None:
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([Transaction("a")])
        path.rename(path.with_name("away"))
        with pytest.raises(FileLostError):
            queue.dispatch_transactions([Transaction("b")])
        path.with_name("away").rename(path)
        queue.dispatch_transactions([Transaction("c")])
        assert [each.id for each in queue.fetch_transactions(10)] == ["a", "c"]


@pytest.mark.req("RN-08")
def test_a_file_lost_between_begin_and_commit_is_noticed(path: Path) -> None:
    def clock() -> float:  # asked inside the transaction
        if path.with_name("now").exists():
            path.unlink()
        return 1.0

    with SqliteConnector(path, clock=clock) as queue:
        queue.dispatch_transactions([Transaction("a")])
        path.with_name("now").touch()
        with pytest.raises(FileLostError):
            queue.dispatch_transactions([Transaction("b"), Transaction("c")])


@pytest.mark.req("RN-08")
def test_a_file_lost_during_a_transaction_of_one_statement_is_noticed(path: Path) -> None:
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([Transaction("a")])
        queue.dispatch_transactions([Transaction("b")])
        queue._rows.cursor.connection.set_trace_callback(lambda _: path.unlink(missing_ok=True))
        with pytest.raises(FileLostError):
            queue.dispatch_transactions([Transaction("c")])


@pytest.mark.req("RN-08")
def test_a_symlink_that_leads_elsewhere_is_a_loss_and_one_that_does_not_is_none(path: Path) -> None:
    link = path.with_name("link.db")
    link.symlink_to(path)
    with SqliteConnector(link) as queue, SqliteConnector(path.with_name("other.db")):
        queue.dispatch_transactions([Transaction("a")])
        link.unlink()
        link.symlink_to(path)
        queue.dispatch_transactions([Transaction("b")])
        link.unlink()
        link.symlink_to(path.with_name("other.db"))
        with pytest.raises(FileLostError, match=r"link\.db was replaced"):
            queue.dispatch_transactions([Transaction("c")])


@pytest.mark.req("RN-08")
def test_a_file_that_is_lost_around_a_fork_is_not_created_again(path: Path) -> None:
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([Transaction("a")])
        child = os.fork()  # closes the connection, here and there
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        for each in path.parent.glob("queue.db*"):
            each.unlink()
        with pytest.raises(FileLostError, match="was deleted"):
            queue.dispatch_transactions([Transaction("b")])
        assert not path.exists()
        with SqliteConnector(path):  # may well have the number of the deleted file
            pass
        with pytest.raises(FileLostError, match="was replaced"):
            queue.dispatch_transactions([Transaction("b")])

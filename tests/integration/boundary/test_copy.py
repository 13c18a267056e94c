"""Copying a boundary from each store to each other one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onceward.boundary.boundary import Boundary
from onceward.boundary.copy import Copied, CopyError, copy
from onceward.boundary.model import envelope_for, fact_of
from onceward.boundary.store import BoundaryStore
from onceward.boundary.stores import open_store
from onceward.boundary.wire import stored
from onceward.cli.main import app
from onceward.errors import ConfigurationError
from onceward.testing.servers import nats_server
from tests.support.boundary import databases
from tests.support.boundary.server import boundary_server

place = databases.place


@pytest.fixture(params=["postgresql", "nats"])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty store on a server."""
    if request.param == "postgresql":
        yield request.getfixturevalue("place").url
        return
    with nats_server() as server:
        yield server.url


async def filled(store: BoundaryStore, count: int) -> None:
    boundary = Boundary(store)
    for number in range(1, count + 1):
        labels = {"retention": "audit"} if number % 2 else {}
        envelope = envelope_for(f"m{number}", from_zone="a", to_zone="b", labels=labels)
        await boundary.append(envelope, fact_of("a:b", "done", {"number": number}))
    await boundary.fetch("new", 1)
    await store.advance("half", count // 2, 1_700_000_000_000)
    await store.advance("all", count)
    await boundary.put("b", "k", pieces(b"artifact"), "text/plain")


async def pieces(blob: bytes) -> AsyncIterator[bytes]:
    yield blob


async def reported(store: BoundaryStore) -> dict[str, object]:
    records = await store.read(0, 1000)
    _, chunks = await store.objects.get("b", "k")
    return {
        "facts": [(stored(each).message_id, stored(each).fact, each[2]) for each in records],
        "offsets": [each[0] for each in records],
        "cursors": {each.name: each.offset for each in await store.cursors()},
        "confirmed at": {each.name: each.confirmed_at_unix_ms for each in await store.cursors()},
        "object": b"".join([chunk async for chunk in chunks]),
    }


@pytest.mark.req("BC-26")
def test_offsets_ids_times_cursors_and_objects_are_the_same_there_and_back(
    elsewhere: str, tmp_path: Path
) -> None:
    async def main() -> None:
        first, middle = await open_store(str(tmp_path / "first")), await open_store(elsewhere)
        last = await open_store(str(tmp_path / "last"))
        await filled(first, 30)
        assert await copy(first, middle) == Copied(facts=30, objects=1, cursors=3, same_offsets=True)
        assert await reported(middle) == await reported(first)
        assert [each.confirmed_at_unix_ms for each in await middle.cursors()][1:] == [1_700_000_000_000, None]
        assert await copy(middle, last) == Copied(facts=30, objects=1, cursors=3, same_offsets=True)
        assert await reported(last) == await reported(first)
        for store in (first, middle, last):
            await store.close()

    asyncio.run(main())


def test_what_expired_leaves_no_hole_and_cursors_stand_where_they_stood(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = await open_store(str(tmp_path / "1")), await open_store(str(tmp_path / "2"))
        await filled(first, 10)
        await first.expire({"operational": 10**15})
        copied = await copy(first, second)
        assert (copied.facts, copied.same_offsets) == (5, False)
        after = await reported(second)
        assert after["offsets"] == [1, 2, 3, 4, 5]
        # Of m1, m3, m5, m7 and m9, the consumer at 5 has confirmed three.
        assert after["cursors"] == {"all": 5, "half": 3, "new": 0}
        assert (await Boundary(second).fetch("half", 1))[1] is None
        await first.close()
        await second.close()

    asyncio.run(main())


def test_a_copy_that_broke_off_is_repeated(tmp_path: Path) -> None:
    class Broken(Exception):
        pass

    def breaking(what: str, count: int) -> None:
        if what == "facts":
            raise Broken

    async def main() -> None:
        first, second = await open_store(str(tmp_path / "1")), await open_store(str(tmp_path / "2"))
        await filled(first, 10)
        with pytest.raises(Broken):
            await copy(first, second, breaking)
        assert await second.cursors() == []
        await copy(first, second)
        await copy(first, second)
        assert await reported(second) == await reported(first)
        await first.close()
        await second.close()

    asyncio.run(main())


@pytest.mark.parametrize(("message_id", "words"), [("other", "not empty"), ("m1", "different content")])
def test_a_store_with_other_facts_in_it_is_refused(tmp_path: Path, message_id: str, words: str) -> None:
    async def main() -> None:
        first, second = await open_store(str(tmp_path / "1")), await open_store(str(tmp_path / "2"))
        await filled(first, 3)
        envelope = envelope_for(message_id, from_zone="x", to_zone="y")
        await Boundary(second).append(envelope, fact_of("x:y", "done", 1))
        with pytest.raises(CopyError, match=words):
            await copy(first, second)
        assert await second.cursors() == []
        await first.close()
        await second.close()

    asyncio.run(main())


def test_the_command_copies_and_says_so(tmp_path: Path) -> None:
    async def fill() -> None:
        store = await open_store(f"sqlite:///{tmp_path / 'first'}")
        await filled(store, 5)
        await store.close()

    asyncio.run(fill())
    command = [
        sys.executable,
        "-m",
        "onceward",
        "boundary",
        "copy",
        "--from",
        str(tmp_path / "first"),
        "--to",
    ]
    ended = subprocess.run([*command, str(tmp_path / "second"), "--json"], capture_output=True, check=True)
    assert json.loads(ended.stdout) == {"facts": 5, "objects": 1, "cursors": 3, "same_offsets": True}
    refused = subprocess.run([*command, "mysql://x/y"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "is not the scheme of a store" in refused.stderr
    nothing = [*command[:-3], "--from", str(tmp_path / "nothing"), "--to", str(tmp_path / "third")]
    missing = subprocess.run(nothing, capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert missing.stderr.startswith(
        f"--from: there is no boundary in '{tmp_path / 'nothing'}', which has no"
    )
    assert not (tmp_path / "nothing").exists()
    with boundary_server(tmp_path / "served"):
        into = CliRunner().invoke(app, [*command[3:], str(tmp_path / "served")])
    assert into.exit_code == 2
    assert into.stderr.startswith("--to: another process, such as a server, uses ")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "directory"),
        ("sqlite://", "directory"),
        ("redis://x", "directory"),
        ("nats://x?copies=3", "not copies"),
        ("nats://x?replicas=many", "must be an integer"),
    ],
)
def test_a_url_that_is_no_store_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        asyncio.run(open_store(url))

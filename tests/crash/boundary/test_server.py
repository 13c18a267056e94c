"""The boundary server killed with -9 under load, again and again; and artifacts larger than memory."""

from __future__ import annotations

import asyncio
import os
import random
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from onceward.boundary import AsyncBoundaryClient, BoundaryClient, StoredFact, envelope_for, fact_of
from onceward.boundary.errors import Unavailable

MB = 1024**2
LITTLE = 100 * MB


class Process:
    """A server in another process, on a directory that outlives it."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "onceward",
                "boundary",
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--data",
                directory,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url, "the server did not start"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def peak(self) -> int:
        """Its peak memory, in bytes."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024


@contextmanager
def server(directory: Path) -> Iterator[Process]:
    process = Process(directory)
    try:
        yield process
    finally:
        process.kill()


class Load:
    """Clients that append and confirm until the server dies, and remember every answer."""

    def __init__(self) -> None:
        self.reported: dict[str, int] = {}
        self.confirmed = 0
        self._next = 0
        self._unanswered: list[str] = []

    async def run(self, url: str, process: Process, after: int) -> None:
        """Kill the server after this many more answers."""
        enough = asyncio.Event()
        goal = len(self.reported) + after
        async with AsyncBoundaryClient(url, timeout=30) as client:
            appenders = [asyncio.create_task(self._append(client, goal, enough)) for _ in range(8)]
            confirming = asyncio.create_task(self._confirm(client))
            await asyncio.wait(
                [asyncio.create_task(enough.wait()), *appenders], return_when="FIRST_COMPLETED"
            )
            await asyncio.sleep(random.uniform(0, 0.01))
            process.kill()
            await asyncio.gather(*appenders, confirming)

    async def _append(self, client: AsyncBoundaryClient, goal: int, enough: asyncio.Event) -> None:
        while True:
            message_id = self._unanswered.pop() if self._unanswered else self._fresh()
            try:
                appended = await client.append(
                    envelope_for(message_id, from_zone="a", to_zone="b"), fact_of("a:b", "done", message_id)
                )
            except Unavailable:
                self._unanswered.append(message_id)
                return
            assert self.reported.setdefault(message_id, appended.offset) == appended.offset
            if len(self.reported) >= goal:
                enough.set()

    async def _confirm(self, client: AsyncBoundaryClient) -> None:
        try:
            while True:
                if facts := (await client.fetch("c", 5)).facts:
                    self.confirmed = max(self.confirmed, await client.confirm("c", facts[-1].offset))
                await asyncio.sleep(0.001)
        except Unavailable:
            return

    def _fresh(self) -> str:
        self._next += 1
        return f"m{self._next}"


@pytest.mark.req("BC-16", "BC-02", "BC-03", "BC-54")
@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.long)])
def test_kills_under_load_lose_no_answered_fact_and_double_none(tmp_path: Path, kills: int) -> None:
    load = Load()
    for _ in range(kills):
        process = Process(tmp_path)
        try:
            asyncio.run(load.run(process.url, process, random.randint(5, 60)))
        finally:
            process.kill()
    with server(tmp_path) as process, BoundaryClient(process.url) as client:
        facts = everything(client, "reader")
        assert [fact.offset for fact in facts] == list(range(1, len(facts) + 1)), "gap-free"
        found = {fact.message_id: fact.offset for fact in facts}
        assert len(found) == len(facts), "none is there twice"
        assert found.items() >= load.reported.items(), "every answered fact, at its offset"
        # A confirm whose answer was lost may have moved the cursor further than any client knows.
        cursor = client.confirm("c", 0)
        assert load.confirmed <= cursor <= load.confirmed + 5
    assert len(load.reported) >= kills * 5


def everything(client: BoundaryClient, name: str) -> list[StoredFact]:
    found: list[StoredFact] = []
    while facts := client.fetch(name, 1000).facts:
        found += facts
        client.confirm(name, facts[-1].offset)
    return found


@pytest.mark.req("BC-17")
@pytest.mark.parametrize("large", [256 * MB, pytest.param(1024 * MB, marks=pytest.mark.long)])
def test_a_large_artifact_needs_little_memory_on_either_side(tmp_path: Path, large: int) -> None:
    piece = os.urandom(MB)
    received = 0

    def count(data: bytes) -> None:
        nonlocal received
        received += len(data)

    with server(tmp_path) as process, BoundaryClient(process.url, timeout=None) as client:
        client.put("b", "small", b"x")
        before, own_before = process.peak, own_peak()
        ref = client.put_stream("b", "large", (piece for _ in range(large // len(piece))))
        client.get_stream("b", "large", count)
        assert ref.size == received == large
        assert process.peak - before < LITTLE
        assert own_peak() - own_before < LITTLE


def own_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.req("BC-17")
def test_an_upload_cut_off_by_a_kill_leaves_no_object_and_can_be_repeated(tmp_path: Path) -> None:
    with server(tmp_path) as process, BoundaryClient(process.url) as client:

        def pieces() -> Iterator[bytes]:
            yield b"x" * 1_000_000
            process.kill()
            yield b"y"

        with pytest.raises(Unavailable):
            client.put_stream("b", "k", pieces())
    with server(tmp_path) as process, BoundaryClient(process.url) as client:
        assert list((tmp_path / "objects" / "incoming").iterdir()) == []
        assert client.put("b", "k", b"whole").size == 5

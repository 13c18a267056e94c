"""Zones lose each other while their receivers are killed with -9; who connects to whom; artifacts larger than memory;
an import that is killed."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from onceward.boundary import (
    AsyncBoundaryClient,
    BoundaryClient,
    Envelope,
    Fact,
    StoredFact,
    envelope_for,
    fact_of,
)
from onceward.boundary.artifacts import as_reference
from onceward.boundary.bundle import export
from onceward.boundary.stores.read_only import open_reader
from tests.crash.boundary.zones_process import ZoneProcess, fill, import_in_process, zone_process
from tests.support.boundary.zones_world import proxy
from tests.support.wait import until_async

FACTS = 5000
"""Of each zone."""
BY_RPC = 500
"""The last ones of them."""
ARTIFACTS = range(FACTS - BY_RPC, FACTS, 50)
DUPLICATES = range(FACTS - BY_RPC - 100, FACTS, 3)
MEGABYTE = 1024**2

_names = itertools.count()


async def facts_at(url: str) -> list[StoredFact]:
    """The whole log."""
    found: list[StoredFact] = []
    name = f"check-{next(_names)}"
    async with AsyncBoundaryClient(url) as client:
        while page := (await client.fetch(name, 1000)).facts:
            found += page
            await client.confirm(name, page[-1].offset)
    return found


async def last_at(url: str, name: str) -> int:
    """The length of the log, for a reader that follows it."""
    async with AsyncBoundaryClient(url) as client:
        while page := (await client.fetch(name, 1000)).facts:
            await client.confirm(name, page[-1].offset)
        return await client.confirm(name, 0)


def content_of(zone: str, number: int) -> bytes:
    return f"{zone} {number} ".encode() * 2000


def message(zone: str, number: int) -> tuple[Envelope, Fact]:
    envelope = envelope_for(f"{zone}-{number}", from_zone=zone, to_zone="everybody")
    return envelope, fact_of("batch:B1", "counted", number)


async def say_more(url: str, zone: str) -> None:
    """Some with artifacts, and some twice, like producers that got no answer."""
    numbers = iter([*range(FACTS - BY_RPC, FACTS), *DUPLICATES])
    async with AsyncBoundaryClient(url) as client:

        async def producer() -> None:
            for number in numbers:
                envelope, fact = message(zone, number)
                if number in ARTIFACTS:
                    content = content_of(zone, number)
                    ref = await client.put("batch-files", f"{zone}-{number}", content, "text/plain")
                    fact = fact_of("batch:B1", "report_filed", as_reference(ref))
                await client.append(envelope, fact)

        await asyncio.gather(*(producer() for _ in range(32)))


@pytest.mark.req("BC-22")
def test_a_partition_and_receivers_killed_before_their_confirm_lose_and_double_nothing(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with proxy("") as to_plant, proxy("") as to_hq:
            for way in (to_plant, to_hq):
                way.cut()
            plant = ZoneProcess(tmp_path / "plant", "plant", to_hq.url)
            hq = ZoneProcess(tmp_path / "hq", "hq", to_plant.url, die_at=2)
            running = [plant, hq]
            try:
                to_plant.target, to_hq.target = plant.url, hq.url
                # Cut off from each other, both accept appends and serve fetches.
                await asyncio.gather(say_more(plant.url, "plant"), say_more(hq.url, "hq"))
                for way in (to_plant, to_hq):
                    way.heal()
                for die_at in (3, 0):
                    await until_async(lambda hq=hq: not hq.is_alive)
                    hq = ZoneProcess(tmp_path / "hq", "hq", to_plant.url, die_at)
                    running.append(hq)
                    to_hq.target = hq.url
                await until_async(lambda: both_have_all(plant, hq))
                await check_both(await facts_at(plant.url), await facts_at(hq.url), plant.url, hq.url)
            finally:
                for process in running:
                    process.kill()

    async def both_have_all(plant: ZoneProcess, hq: ZoneProcess) -> bool:
        lengths = [await last_at(zone.url, "length") for zone in (plant, hq)]
        return min(lengths) >= 2 * FACTS

    async def check_both(at_plant: list[StoredFact], at_hq: list[StoredFact], *urls: str) -> None:
        for facts in (at_plant, at_hq):
            assert len(facts) == 2 * FACTS
            assert len({fact.message_id for fact in facts}) == 2 * FACTS
        for origin in ("plant", "hq"):
            orders = [
                [fact.message_id for fact in facts if fact.envelope.from_zone == origin]
                for facts in (at_plant, at_hq)
            ]
            assert orders[0] == orders[1]
            for url in urls:
                async with AsyncBoundaryClient(url) as client:
                    for number in ARTIFACTS:
                        found, _ = await client.get("batch-files", f"{origin}-{number}")
                        assert found == content_of(origin, number)

    for zone in ("plant", "hq"):
        fill(tmp_path / zone, [message(zone, number) for number in range(FACTS - BY_RPC)])
    asyncio.run(story())


def outbound(pid: int, listening: int) -> list[str]:
    """Connections that a process has opened itself: their local port is not the one it listens on."""
    sockets = set()
    for descriptor in os.scandir(f"/proc/{pid}/fd"):
        try:
            sockets.add(os.readlink(descriptor.path))
        except FileNotFoundError:
            continue
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[2] for row in rows if f"socket:[{row[9]}]" in sockets and int(row[1][-4:], 16) != listening]


@pytest.mark.req("BC-22")
def test_the_source_opens_no_connection_of_its_own(tmp_path: Path) -> None:
    with (
        zone_process(tmp_path / "plant", "plant") as plant,
        zone_process(tmp_path / "hq", "hq", plant.url) as hq,
        BoundaryClient(plant.url) as there,
        BoundaryClient(hq.url) as here,
    ):
        port = int(plant.url.rpartition(":")[2])
        for number in itertools.count():
            there.append(*message("plant", number))
            assert outbound(plant.pid, port) == []
            if len(here.fetch("watcher", 100).facts) >= 30:
                break
        assert outbound(hq.pid, int(hq.url.rpartition(":")[2])) != []  # as the puller sees it


def test_an_artifact_is_never_whole_in_memory(tmp_path: Path) -> None:
    size = 96 * MEGABYTE

    async def megabytes() -> AsyncIterator[bytes]:
        for _ in range(size // MEGABYTE):
            yield bytes(MEGABYTE)

    async def story(plant: ZoneProcess, hq: ZoneProcess) -> None:
        async with AsyncBoundaryClient(plant.url) as there, AsyncBoundaryClient(hq.url) as here:
            before = plant.peak, hq.peak
            ref = await there.put_stream("batch-files", "large", megabytes(), "a/b")
            envelope = envelope_for("m1", from_zone="plant", to_zone="hq")
            await there.append(envelope, fact_of("batch:B1", "filmed", as_reference(ref)))

            async def arrived() -> bool:
                return bool((await here.fetch("watcher")).facts)

            await until_async(arrived)
            after = plant.peak, hq.peak
            assert all(now - then < 48 * MEGABYTE for then, now in zip(before, after, strict=True))

    with (
        zone_process(tmp_path / "plant", "plant") as plant,
        zone_process(tmp_path / "hq", "hq", plant.url) as hq,
    ):
        asyncio.run(story(plant, hq))


def test_an_import_that_is_killed_is_repeated(tmp_path: Path) -> None:
    bundle = tmp_path / "plant.bundle"
    fill(tmp_path / "plant", [message("plant", number) for number in range(1100)])
    with zone_process(tmp_path / "plant", "plant") as plant, BoundaryClient(plant.url) as client:
        envelope = envelope_for("plant-1100", from_zone="plant", to_zone="hq")
        client.append_with_artifact(
            envelope, "batch:B1", "filed", b"report", bucket="batch-files", key="B1", media_type="a/b"
        )
        for number in range(1101, 1200):
            client.append(*message("plant", number))

        async def write() -> None:
            async with open_reader(str(tmp_path / "plant")) as look:
                await export(look, "plant", 0, None, str(bundle))

        asyncio.run(write())
    tries = [import_in_process(tmp_path / "hq", bundle, "hq", die_after) for die_after in (1, 2, 3, 0)]
    assert tries == [False, False, False, True]
    with zone_process(tmp_path / "hq", "hq") as hq, BoundaryClient(hq.url) as client:
        facts = asyncio.run(facts_at(hq.url))
        assert [fact.message_id for fact in facts] == [f"plant-{number}" for number in range(1200)]
        assert client.get("batch-files", "B1")[0] == b"report"

"""Zones: the receiver pulls, appends and confirms; cut links heal; nothing loops; a fact that cannot be accepted stops
its link until an operator decides."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from onceward.boundary import AsyncBoundaryClient, BoundaryClient, envelope_for, fact_of
from onceward.boundary.artifacts import as_reference
from onceward.boundary.boundary import Boundary, BoundarySettings
from onceward.boundary.errors import Unavailable
from onceward.boundary.links.manager import Links, LinkSettings, LinkStopped, ZoneLink
from onceward.boundary.model import ObjectRef
from onceward.cli.main import app
from onceward.errors import ConfigurationError
from tests.support.boundary.server import boundary_server
from tests.support.boundary.zones_world import World, Zone, pieces_of, quiet, zones_in
from tests.support.wait import until, until_async

WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}
CONSUMER = "zone:hq"
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    """Runs a test in a world of zones."""

    def run(story: Callable[[World], Awaitable[None]]) -> None:
        async def within() -> None:
            async with zones_in(tmp_path) as world:
                await story(world)

        asyncio.run(within())

    return run


Play = Callable[[Callable[[World], Awaitable[None]]], None]


def client_of(url: str) -> Callable[[], AsyncBoundaryClient]:
    return partial(AsyncBoundaryClient, url)


def lines(caplog: pytest.LogCaptureFixture, outcome: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "outcome", "") == outcome]


# ── the handoff ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-22")
def test_facts_are_durable_here_before_they_are_confirmed_there(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        said = await plant.say(25)
        confirmed: list[int] = []

        class Watching(AsyncBoundaryClient):
            async def confirm(self, consumer_name: str, offset: int) -> int:
                assert await hq.ids() == said[:offset]
                confirmed.append(offset)
                return await super().confirm(consumer_name, offset)

        link = ZoneLink("plant", lambda: Watching(plant.url), hq.boundary, "hq", page=10)
        await link.drain()
        assert confirmed == [10, 20, 25]
        assert await hq.ids() == said
        assert (link.report.counts, link.report.frontier) == ({"appended": 25}, 25)

    play(story)


def test_what_is_here_already_is_passed_and_confirmed(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        said = await plant.say(6)
        for number in (4, 1):  # as after a crash, or by another route
            stored = (await plant.log())[number]
            await hq.boundary.append(stored.envelope, stored.fact)
        link = ZoneLink("plant", client_of(plant.url), hq.boundary, "hq")
        await link.drain()
        assert link.report.counts == {"appended": 4, "duplicate": 2}
        assert sorted(await hq.ids()) == sorted(said)
        assert await plant.position(CONSUMER) == 6

    play(story)


def test_a_fact_keeps_its_envelope_and_its_text(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        envelope = envelope_for(
            "m1",
            from_zone="plant",
            to_zone="hq",
            labels={"retention": "audit", "site": "north"},
            correlation_id="c1",
            causation_id="c0",
            object_media_type="application/json",
            object_schema="urn:batch:v1",
            produced_at_unix_ms=1,
        )
        fact = fact_of("batch:PlantA/B1", "completed", {"name": "Zürich", "litres": 1.5, "path": "a\\b"})
        await plant.boundary.append(envelope, fact)
        await ZoneLink("plant", client_of(plant.url), hq.boundary, "hq").drain()
        (arrived,) = await hq.log()
        assert (arrived.envelope, arrived.fact) == (envelope, fact)

    play(story)


def test_two_links_of_one_name_bring_nothing_twice(play: Play) -> None:
    """As after a mistake: both get the same facts."""

    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        said = await plant.say(200)
        pulling = [ZoneLink(name, client_of(plant.url), hq.boundary, "hq", page=7) for name in ("one", "two")]
        await asyncio.gather(*(link.drain() for link in pulling))
        assert await hq.ids() == said

    play(story)


# ── loops ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-22")
def test_both_directions_at_once_do_not_loop(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        of_plant, of_hq = await plant.say(40), await hq.say(30)
        await plant.pull(hq.url)
        await hq.pull(plant.url)
        await until_async(lambda: plant.has(*of_hq))
        await until_async(lambda: hq.has(*of_plant))
        await quiet(plant, hq)
        for zone in (plant, hq):
            assert await zone.ids("plant") == of_plant
            assert await zone.ids("hq") == of_hq
            assert len(await zone.log()) == 70
        assert hq.metric("onceward_boundary_link_facts_total", link="from-0", outcome="own") == 30
        assert await plant.position(CONSUMER) == 70  # all of it confirmed, including its own

    play(story)


@pytest.mark.req("BC-22")
@pytest.mark.parametrize("shape", ["chain", "ring", "ring both ways"])
def test_three_zones_have_every_fact_once_and_stop_growing(play: Play, shape: str) -> None:
    async def story(world: World) -> None:
        a, b, c = [await world.zone(name) for name in "abc"]
        before = {zone.name: await zone.say(20) for zone in (a, b, c)}
        pulls = {"chain": [(b, a), (c, b)], "ring": [(b, a), (c, b), (a, c)]}
        pulls["ring both ways"] = [*pulls["ring"], (a, b), (b, c), (c, a)]
        for receiver, source in pulls[shape]:
            await receiver.pull(source.url)
        while_running = {zone.name: await zone.say(20) for zone in (a, b, c)}
        said = {name: before[name] + while_running[name] for name in before}
        reach = {"a": "a", "b": "ab", "c": "abc"} if shape == "chain" else dict.fromkeys("abc", "abc")
        for zone in (a, b, c):
            await until_async(
                lambda zone=zone: zone.has(*(id_ for name in reach[zone.name] for id_ in said[name]))
            )
        await quiet(*(source for _, source in pulls[shape]))
        for zone in (a, b, c):
            assert len(await zone.log()) == 40 * len(reach[zone.name])
            for name in reach[zone.name]:
                assert await zone.ids(name) == said[name]

    play(story)


# ── a cut link ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-22")
@pytest.mark.parametrize("kind", ["cut", "silent"])
def test_a_lost_link_stops_nothing_here_and_heals_by_itself(
    play: Play, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onceward.boundary")

    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        way = await world.proxy(plant.url)
        await hq.pull(way.url, client=partial(AsyncBoundaryClient, way.url, timeout=0.2))
        first = await plant.say(10)
        await until_async(lambda: hq.metric("onceward_boundary_link_frontier_offset", link="from-0") == 10)
        await until_async(lambda: hq.metric("onceward_boundary_link_up", link="from-0") == 1)
        way.cut() if kind == "cut" else way.fall_silent()
        second = await plant.say(10)
        await until_async(lambda: hq.metric("onceward_boundary_link_up", link="from-0") == 0)
        tries = way.connections
        async with AsyncBoundaryClient(plant.url) as there, AsyncBoundaryClient(hq.url) as here:
            for zone, client in ((plant, there), (hq, here)):
                appended = await client.append(*zone.message())
                assert (await client.fetch("local", 1000)).facts[-1].offset == appended.offset
                assert await client.confirm("local", appended.offset) == appended.offset
        await until_async(lambda: way.connections >= tries + 3)
        assert not await hq.has(second[0])
        assert await plant.position(CONSUMER) == 10
        assert (hq.metric("onceward_boundary_replication_lag_seconds", link="from-0") or 0) > 0
        way.heal()
        await until_async(lambda: hq.has(*second))
        await until_async(lambda: hq.metric("onceward_boundary_link_up", link="from-0") == 1)
        assert (await hq.ids("plant"))[:20] == first + second

    play(story)
    assert len(lines(caplog, "down")) <= 2  # logged when it changes, not at every attempt
    assert [record.getMessage() for record in lines(caplog, "up")][-1] == "link from-0 is up"


def test_it_waits_longer_and_longer_between_tries_up_to_the_limit(play: Play) -> None:
    async def story(world: World) -> None:
        hq = await world.zone("hq")
        waits: list[float] = []

        def connect() -> AsyncBoundaryClient:
            waits.append(0)
            if len(waits) > 8:
                link.end()
            return AsyncBoundaryClient(NOWHERE)

        async def sleep(seconds: float) -> None:
            waits[-1] += seconds

        link = ZoneLink("plant", connect, hq.boundary, "hq", longest_wait=2.0, sleep=sleep)
        await link.run()
        for waited, most in zip(waits, [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0], strict=False):
            assert most / 2 <= waited <= most + 1e-9

    play(story)


def test_a_failure_of_this_side_is_tried_again_as_well(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")

        class Failing(Boundary):
            failures = 3

            async def append_all(self, messages: Any) -> Any:
                if self.failures:
                    self.failures -= 1
                    raise Unavailable("nothing was written: the disk is full; try again")
                return await super().append_all(messages)

        said = await plant.say(5)
        here = Failing(hq.boundary.store)
        links = Links(here, "hq", [LinkSettings(name="plant", url=plant.url, longest_wait=0.05)])
        links.start()
        await until_async(lambda: hq.has(*said))
        await links.close()
        assert (here.failures, await hq.ids()) == (0, said)

    play(story)


def test_a_bug_does_not_end_a_link(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        said = await plant.say(1)
        made: list[str] = []

        def connect() -> AsyncBoundaryClient:
            made.append("client")
            if len(made) < 3:
                raise RuntimeError("a bug")
            return AsyncBoundaryClient(plant.url)

        await hq.pull(plant.url, client=connect)
        await until_async(lambda: hq.has(*said))

    play(story)
    (reported,) = lines(caplog, "down")
    assert "RuntimeError: a bug" in reported.getMessage()
    assert reported.exc_info is not None


@pytest.mark.req("BC-22")
def test_10000_facts_of_a_long_partition_arrive_once_and_in_order(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        ways = await world.proxy(plant.url), await world.proxy(hq.url)
        await hq.pull(ways[0].url)
        await plant.pull(ways[1].url)
        early = await plant.say(1), await hq.say(1)
        await until_async(lambda: hq.has(*early[0]))
        await until_async(lambda: plant.has(*early[1]))
        for way in ways:
            way.cut()
        said = {zone.name: (await zone.ids(zone.name)) + await zone.say(5000) for zone in (plant, hq)}
        for way in ways:
            way.heal()
        for zone in (plant, hq):
            await until_async(lambda zone=zone: reaches(zone, 10_002))
        await quiet(plant, hq)
        for zone in (plant, hq):
            assert len(await zone.log()) == 10_002
            for name, ids in said.items():
                assert await zone.ids(name) == ids

    async def reaches(zone: Zone, offset: int) -> bool:
        return await zone.last() >= offset

    play(story)


# ── artifacts ───────────────────────────────────────────────────────────────────────────────────────────


def test_artifacts_are_here_before_the_facts_that_refer_to_them(play: Play) -> None:
    async def story(world: World) -> None:
        plant = await world.zone("plant")
        hq = await world.zone("hq", BoundarySettings(require_artifacts=True))
        contents = {f"B{number}.txt": f"report {number} ".encode() * 500 for number in range(5)}
        for key, content in contents.items():
            await plant.say_with_artifact(content, key)
        await ZoneLink("plant", client_of(plant.url), hq.boundary, "hq").drain()
        assert len(await hq.log()) == 5
        for key, content in contents.items():
            assert await hq.artifact(key) == content
            ref = await hq.boundary.store.objects.head("batch-files", key)
            assert ref == await plant.boundary.store.objects.head("batch-files", key)

    play(story)


def test_an_artifact_that_is_here_is_not_fetched_again(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        await plant.say_with_artifact(b"report", "B1.txt")
        await hq.boundary.put("batch-files", "B1.txt", pieces_of(b"report"), "text/plain")

        class NoObjects(AsyncBoundaryClient):
            def get_pieces(self, bucket: str, key: str) -> Any:
                raise AssertionError("nobody asked for this")

        await ZoneLink("plant", lambda: NoObjects(plant.url), hq.boundary, "hq").drain()
        assert len(await hq.log()) == 1

    play(story)


def test_a_value_that_only_looks_like_a_reference_is_forwarded_as_it_is(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        whole = as_reference(
            ObjectRef(bucket="b", key="k", digest="sha256:" + "0" * 64, size=1, media_type="a/b")
        )
        for value in (
            {"bucket": "b", "key": "k"},
            {**whole, "digest": "md5:1"},
            {**whole, "bucket": "../elsewhere"},
            {"note": '"bucket" and "digest"'},
            ["bucket", "digest"],
        ):
            await plant.say(1, value=value)
        link = ZoneLink("plant", client_of(plant.url), hq.boundary, "hq")
        await link.drain()
        assert link.report.counts == {"appended": 5}

    play(story)


def test_an_artifact_missing_at_the_source_holds_the_link_until_it_is_put(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        content = b"it comes later"
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        ref = ObjectRef(
            bucket="batch-files", key="late", digest=digest.upper(), size=len(content), media_type="a/b"
        )
        before = await plant.say(2)
        await plant.say(1, value=as_reference(ref) | {"digest": "sha256:" + digest[7:].upper()})
        after = await plant.say(1)
        await hq.pull(plant.url)
        await until_async(lambda: hq.metric("onceward_boundary_link_stopped", link="from-0") == 1)
        assert (await hq.ids(), await plant.position(CONSUMER)) == (before, 2)
        await plant.boundary.put("batch-files", "late", pieces_of(content), "a/b")
        await until_async(lambda: hq.has(*after))
        assert await hq.artifact("late") == content
        await until_async(lambda: hq.metric("onceward_boundary_link_stopped", link="from-0") == 0)

    play(story)


def test_an_artifact_with_other_bytes_than_the_fact_says_is_not_kept(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        ref = await plant.boundary.put("batch-files", "B1", pieces_of(b"one thing"), "a/b")
        other = {**as_reference(ref), "digest": f"sha256:{hashlib.sha256(b'other one').hexdigest()}"}
        await plant.say(1, value=other)
        with pytest.raises(LinkStopped, match="object batch-files/B1 has digest"):
            await ZoneLink("plant", client_of(plant.url), hq.boundary, "hq").drain()
        assert await hq.boundary.store.objects.head("batch-files", "B1") is None
        assert await hq.log() == []

    play(story)


def test_other_bytes_under_an_artifact_s_name_stop_the_link(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        await plant.say_with_artifact(b"theirs", "B1")
        await hq.boundary.put("batch-files", "B1", pieces_of(b"ours"), "text/plain")
        with pytest.raises(LinkStopped, match="object batch-files/B1 already exists with different bytes"):
            await ZoneLink("plant", client_of(plant.url), hq.boundary, "hq").drain()
        assert await hq.artifact("B1") == b"ours"

    play(story)


def test_a_link_that_is_cut_within_an_artifact_keeps_what_came_before_it(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        before = await plant.say(3)
        last = await plant.say_with_artifact(b"x" * 5000, "B1")

        class Cut(AsyncBoundaryClient):
            async def get_pieces(self, bucket: str, key: str) -> Any:
                yield b"x" * 100
                raise Unavailable("the connection is lost")

        with pytest.raises(Unavailable):
            await ZoneLink("plant", lambda: Cut(plant.url), hq.boundary, "hq").drain()
        assert (await hq.ids(), await plant.position(CONSUMER)) == (before, 3)
        assert await hq.boundary.store.objects.head("batch-files", "B1") is None
        await ZoneLink("plant", client_of(plant.url), hq.boundary, "hq").drain()
        assert await hq.ids() == [*before, last]
        assert await hq.artifact("B1") == b"x" * 5000

    play(story)


# ── facts that cannot be accepted ───────────────────────────────────────────────────────────────────────


async def conflicting(plant: Zone, hq: Zone) -> tuple[list[str], list[str]]:
    """The fourth fact of the plant has an id that hq knows with other content. Returns those before and after it."""
    before = await plant.say(3)
    envelope, fact = plant.message("theirs")
    await plant.boundary.append(envelope, fact)
    after = await plant.say(2)
    await hq.boundary.append(envelope, fact_of(fact.subject, fact.predicate, "ours"))
    return before, after


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["boundary", *arguments], env=WIDE)


def test_a_conflict_stops_its_link_alone_until_an_operator_decides(
    play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        plant, other, hq = [await world.zone(name) for name in ("plant", "other", "hq")]
        before, after = await conflicting(plant, hq)
        await hq.pull(plant.url)
        await hq.pull(other.url)
        await until_async(lambda: hq.metric("onceward_boundary_link_stopped", link="from-0") == 1)
        assert await plant.position(CONSUMER) == 3
        assert await hq.has(*before)
        asked = plant.metric("onceward_boundary_fetch_requests_total") or 0
        await until_async(
            lambda: (plant.metric("onceward_boundary_fetch_requests_total") or 0) > asked + 5
        )  # it looks again
        of_other = await other.say(5)
        await until_async(lambda: hq.has(*of_other))
        assert hq.metric("onceward_boundary_link_stopped", link="from-1") == 0
        assert hq.metric("onceward_boundary_link_frontier_offset", link="from-0") == 3
        (ours,) = [fact for fact in await hq.log() if fact.message_id == "plant-4"]
        assert ours.fact.object == "ours"
        decided = await asyncio.to_thread(
            run,
            "skip",
            *(
                "--from",
                plant.url,
                "--consumer",
                CONSUMER,
                "--offset",
                "4",
                "--reason",
                "a test at the plant",
                "--operator",
                "jane",
            ),
            *("--to", str(tmp_path / "hq")),
        )
        assert decided.exit_code == 0, decided.output
        assert '"theirs"' in decided.stdout
        assert '"ours"' in decided.stdout
        assert "Skipped: zone:hq continues after offset 4. Reason: a test at the plant" in decided.stdout
        await until_async(lambda: hq.has(*after))
        await until_async(lambda: hq.metric("onceward_boundary_link_stopped", link="from-0") == 0)
        assert [each for each in await hq.ids("plant") if each != "plant-4"] == before + after

    play(story)
    (stopped, *again) = [line for line in lines(caplog, "stopped") if line.levelno == logging.ERROR]
    assert len(again) <= len(lines(caplog, "down")), "only a link that was down meanwhile says it again"
    assert (stopped.message_id, stopped.offset, stopped.link) == ("plant-4", 4, "from-0")  # type: ignore[attr-defined]
    assert "already exists at offset 1 with different content" in stopped.getMessage()
    (skipped,) = lines(caplog, "skipped")
    assert skipped.levelno == logging.WARNING
    assert (skipped.message_id, skipped.offset, skipped.link) == ("plant-4", 4, "from-0")  # type: ignore[attr-defined]
    assert "the fact at offset 4 was skipped, and is not taken; jane at 2" in skipped.getMessage()
    assert skipped.getMessage().endswith(": a test at the plant")


def test_facts_of_the_page_behind_a_conflict_may_stand_here_already_and_are_not_doubled(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        before, after = await conflicting(plant, hq)
        all_of_them = ["plant-4", *before, *after]  # hq had its own plant-4 first
        for _ in range(2):
            link = ZoneLink("plant", client_of(plant.url), hq.boundary, "hq")
            with pytest.raises(LinkStopped):
                await link.drain()
            assert await hq.ids() == all_of_them, "appended with their page"
            assert await plant.position(CONSUMER) == 3, "but not confirmed"
        skip = ("skip", "--from", plant.url, "--consumer", CONSUMER, "--offset", "4", "--reason", "why")
        assert (await asyncio.to_thread(run, *skip)).exit_code == 0
        link = ZoneLink("plant", client_of(plant.url), hq.boundary, "hq")
        await link.drain()
        assert link.report.counts == {"duplicate": len(after)}
        assert await hq.ids() == all_of_them
        assert await plant.position(CONSUMER) == await plant.last()

    play(story)


def test_why_a_fact_was_skipped_is_kept_at_the_source_and_can_be_read_later(tmp_path: Path) -> None:
    with boundary_server(tmp_path / "plant") as url, BoundaryClient(url) as plant:
        for number in (1, 2):
            plant.append(envelope_for(f"m{number}", from_zone="plant", to_zone="hq"), fact_of("a:b", "c", 1))
        plant.fetch(CONSUMER)
        skip = ("skip", "--from", url, "--consumer", CONSUMER)
        reported = run(*skip, "--offset", "1", "--reason", " test data ", "--operator", "jane")
        assert "Read it again: `onceward boundary get skipped-facts zone:hq/1.json -" in reported.stdout
        kept = json.loads(run("get", "skipped-facts", "zone:hq/1.json", "-", "--url", url).stdout)
        assert datetime.fromisoformat(kept.pop("at")).tzinfo is not None
        assert len(kept.pop("digest")) == 64
        assert kept == {
            "consumer": "zone:hq",
            "offset": 1,
            "message_id": "m1",
            "reason": "test data",
            "operator": "jane",
        }
        # If it is killed between recording and confirming, it repeats with the same reason, and the first record stays.
        record = json.dumps({**kept, "offset": 2, "message_id": "m2", "digest": "d", "at": "a"})
        plant.put("skipped-facts", "zone:hq/2.json", record.encode(), "application/json")
        refused = run(*skip, "--offset", "2", "--reason", "another")
        assert refused.exit_code == 1
        assert "already records another reason to skip offset 2: 'test data'; repeat" in refused.stderr
        assert plant.fetch(CONSUMER).facts[0].offset == 2
        assert run(*skip, "--offset", "2", "--reason", "test data").exit_code == 0
        assert plant.fetch(CONSUMER).facts == ()


def test_skip_shows_both_sides_and_changes_nothing_without_a_reason(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        await conflicting(plant, hq)
        with pytest.raises(LinkStopped):
            await ZoneLink("plant", client_of(plant.url), hq.boundary, "hq").drain()
        look = ("skip", "--from", plant.url, "--consumer", CONSUMER, "--to", str(tmp_path / "hq"))
        shown = await asyncio.to_thread(run, *look, "--json")
        assert shown.exit_code == 0, shown.output
        reported = json.loads(shown.stdout)
        assert (reported["skipped"], reported["offset"], reported["reason"]) == (False, 4, None)
        assert (reported["source"]["object_json"], reported["here"]["object_json"]) == ('"theirs"', '"ours"')
        assert reported["source"]["subject"] == reported["here"]["subject"] == "batch:4"
        assert reported["source"]["digest"] != reported["here"]["digest"]
        shown = await asyncio.to_thread(run, *look)
        assert "Nothing was changed. To skip it, repeat this with --offset 4 --reason TEXT." in shown.stdout
        shown = await asyncio.to_thread(run, *look[:-2])
        assert '"theirs"' in shown.stdout
        assert await plant.position(CONSUMER) == 3

    play(story)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--offset", "5", "--reason", "r"), 1, "the next fact of zone:hq is at offset 4, not 5"),
        (("--offset", "3", "--reason", "r"), 1, "the next fact of zone:hq is at offset 4, not 3"),
        (("--offset", "4"), 2, "--offset and --reason go together"),
        (("--reason", "r"), 2, "--offset and --reason go together"),
        (("--offset", "4", "--reason", "  "), 2, "--reason is empty"),
        (("--consumer", "zone:hg"), 1, "there is no consumer 'zone:hg'"),
        (("--to", "/nowhere"), 2, "there is no boundary in '/nowhere'"),
        (("--from", NOWHERE), 1, "cannot be reached"),
    ],
)
def test_skip_refuses_what_is_not_the_very_next_fact(
    tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    with boundary_server(tmp_path / "plant") as url, BoundaryClient(url) as plant:
        for number in range(6):
            plant.append(
                envelope_for(f"m{number}", from_zone="plant", to_zone="hq"), fact_of("a:b", "c", number)
            )
        plant.fetch(CONSUMER)
        plant.confirm(CONSUMER, 3)
        result = run("skip", "--from", url, "--consumer", CONSUMER, *arguments)
        assert (result.exit_code, result.stdout) == (code, "")
        assert words in result.stderr
        assert plant.fetch(CONSUMER, 1).facts[0].offset == 4
        with pytest.raises(Exception, match="never fetched"):
            plant.confirm("zone:hg", 0)  # a misspelled name was not created


def test_skip_says_that_nothing_waits(tmp_path: Path) -> None:
    with boundary_server(tmp_path / "plant") as url, BoundaryClient(url) as plant:
        plant.fetch(CONSUMER)
        result = run("skip", "--from", url, "--consumer", CONSUMER)
        assert (result.exit_code, "nothing is waiting for zone:hq" in result.stderr) == (1, True)


def test_an_origin_that_the_source_may_not_speak_for_stops_the_link(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        before = await plant.say(2)
        await plant.boundary.append(
            envelope_for("m1", from_zone="elsewhere", to_zone="hq"), fact_of("a:b", "c", 1)
        )
        await plant.boundary.append(envelope_for("m2", from_zone="hq", to_zone="hq"), fact_of("a:b", "c", 1))
        after = await plant.say(1)
        link = ZoneLink("plant", client_of(plant.url), hq.boundary, "hq", from_zones=("plant",))
        with pytest.raises(LinkStopped, match="from zone 'elsewhere', which is not in the link's from_zones"):
            await link.drain()
        assert (await hq.ids(), await plant.position(CONSUMER)) == (before, 2)
        await plant.boundary.confirm(CONSUMER, 3)
        await link.drain()
        assert await hq.ids() == before + after

    play(story)


def test_only_facts_for_the_chosen_zones_are_taken_if_any_are_chosen(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        for to_zone in ("hq", "plant-b", "labs", "hq", "plant-b"):
            await plant.say(1, to_zone=to_zone)
        link = ZoneLink("plant", client_of(plant.url), hq.boundary, "hq", to_zones=("hq", "labs"))
        await link.drain()
        assert await hq.ids() == ["plant-1", "plant-3", "plant-4"]
        assert link.report.counts == {"appended": 3, "not_for_us": 2}
        assert await plant.position(CONSUMER) == 5

    play(story)


def test_a_fact_that_this_side_refuses_stops_the_link_there(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = (
            await world.zone("plant"),
            await world.zone("hq", BoundarySettings(require_artifacts=True)),
        )
        before = await plant.say(3)
        await plant.say(1, value={"bucket": "b", "key": "not a whole reference"})
        await plant.say(2)
        with pytest.raises(LinkStopped, match=r"'plant-4' at offset 4 .* object b/not a whole reference"):
            await ZoneLink("plant", client_of(plant.url), hq.boundary, "hq").drain()
        assert (await hq.ids(), await plant.position(CONSUMER)) == (before, 3)

    play(story)


def test_expired_facts_are_reported_counted_and_passed(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        await plant.say(5)
        await hq.pull(plant.url)
        await until_async(lambda: plant_position_is(plant, 5))
        await hq.links.close()
        said = await plant.say(5)
        await plant.boundary.store.drop(8)
        hq.links.start()
        await until_async(lambda: hq.has(*said[3:]))
        await until_async(lambda: plant_position_is(plant, 10))
        assert not await hq.has("plant-8")
        await hq.links.close()
        await plant.say(3)
        await plant.boundary.store.drop(13)  # nothing is left
        hq.links.start()
        await until_async(lambda: plant_position_is(plant, 13))
        await quiet(plant)
        assert hq.metric("onceward_boundary_link_missed_facts_total", link="from-0") == 6

    async def plant_position_is(plant: Zone, offset: int) -> bool:
        return await plant.position(CONSUMER) == offset

    play(story)
    reported = [record.getMessage() for record in lines(caplog, "gap") if record.levelno == logging.ERROR]
    assert reported == [
        "link from-0 missed facts 6 to 8: they expired at the source, and are lost to this zone",
        "link from-0 missed facts 11 to 13: they expired at the source, and are lost to this zone",
    ]


# ── what operators see ──────────────────────────────────────────────────────────────────────────────────


def test_metrics_say_how_a_link_is(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        hour_ago = int((time.time() - 3600) * 1000)
        records = [plant.message() for _ in range(7)]
        await plant.boundary.append_all(records)
        with plant.boundary.store._writing as writing:  # type: ignore[attr-defined]
            writing.execute("UPDATE facts SET appended_at = ?", (hour_ago,))
        await hq.pull(plant.url, name="plant")
        await until_async(lambda: hq.has("plant-7"))
        await until_async(
            lambda: (
                hq.metric("onceward_boundary_replication_lag_seconds", link="plant")
                == pytest.approx(0, abs=5)
            )
        )
        found = {
            name: hq.metric(f"onceward_boundary_{name}", link="plant")
            for name in ("link_up", "link_stopped", "link_frontier_offset", "link_backlog")
        }
        assert found == {"link_up": 1, "link_stopped": 0, "link_frontier_offset": 7, "link_backlog": 0}
        assert hq.metric("onceward_boundary_replication_lag_high_watermark", link="plant") == pytest.approx(
            3600, abs=60
        )
        assert hq.metric("onceward_boundary_link_facts_total", link="plant", outcome="appended") == 7
        assert b'onceward_boundary_link_up{link="plant"} 1.0' in hq.boundary.metrics.text()

    play(story)


def test_the_frontier_of_a_link_never_goes_back(play: Play) -> None:
    async def story(world: World) -> None:
        plant, empty, hq = [await world.zone(name) for name in ("plant", "empty", "hq")]
        await plant.say(4)
        way = await world.proxy(plant.url)
        await hq.pull(way.url)
        await until_async(lambda: hq.metric("onceward_boundary_link_frontier_offset", link="from-0") == 4)
        way.cut()
        way.target = empty.url  # a source that was restored from nothing
        said = await empty.say(2)
        way.heal()
        await until_async(lambda: hq.has(*said))
        assert hq.metric("onceward_boundary_link_frontier_offset", link="from-0") == 4

    play(story)


# ── several links on one server ─────────────────────────────────────────────────────────────────────────


def test_links_are_replaced_while_they_run_and_equal_ones_left_alone(play: Play) -> None:
    async def story(world: World) -> None:
        a, b, hq = [await world.zone(name) for name in ("a", "b", "hq")]
        connected: list[str] = []

        def client(url: str) -> AsyncBoundaryClient:
            connected.append(url)
            return AsyncBoundaryClient(url)

        of_a = LinkSettings(name="a", url=a.url, client=partial(client, a.url))
        of_b = LinkSettings(name="b", url=b.url, client=partial(client, b.url))
        links = Links(hq.boundary, "hq", [of_a])
        links.start()
        await a.say(1)
        await until_async(
            lambda: hq.metric("onceward_boundary_link_facts_total", link="a", outcome="appended") == 1
        )
        await links.update([of_a, of_b])
        second = await b.say(1)
        await until_async(lambda: hq.has(*second))
        assert connected == [a.url, b.url]
        await links.update([of_b])
        assert hq.metric("onceward_boundary_link_up", link="a") is None
        assert hq.metric("onceward_boundary_link_facts_total", link="a", outcome="appended") == 1
        late = await a.say(1)
        with pytest.raises(ConfigurationError):
            await links.update([of_b, of_b])
        await quiet(b)
        assert not await hq.has(*late)
        await links.close()
        await links.close()

    play(story)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"url": "plant:7700"}, "URL of a boundary"),
        ({"consumer": "Zürich"}, "must be ASCII"),
        ({"longest_wait": 0}, "longest_wait of link 'plant'"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_runs(
    play: Play, more: dict[str, Any], words: str
) -> None:
    async def story(world: World) -> None:
        hq = await world.zone("hq")
        settings = LinkSettings(**{"name": "plant", "url": NOWHERE, **more})
        with pytest.raises(ConfigurationError, match=words):
            Links(hq.boundary, "hq", [settings])
        with pytest.raises(ConfigurationError, match="needs the zone"):
            Links(hq.boundary, "", [LinkSettings(name="plant", url=NOWHERE)])
        assert hq.metric("onceward_boundary_link_up", link="plant") is None

    play(story)


# ── over RPC, and step by step ──────────────────────────────────────────────────────────────────────────


def test_over_rpc_the_order_artifacts_and_conflicts_are_the_same(play: Play) -> None:
    async def story(world: World) -> None:
        plant, hq = (
            await world.zone("plant"),
            await world.zone("hq", BoundarySettings(require_artifacts=True)),
        )
        with_artifact = await plant.say_with_artifact(b"report" * 1000, "B1")
        before, after = await conflicting(plant, hq)
        async with AsyncBoundaryClient(hq.url) as here:
            link = ZoneLink("plant", client_of(plant.url), here, "hq", page=2)
            with pytest.raises(LinkStopped, match="'plant-5' at offset 5"):
                await link.drain()
            assert await hq.ids("plant") == ["plant-5", with_artifact, *before, after[0]], "with its page"
            assert await plant.position(CONSUMER) == 4, "but not confirmed"
            await plant.boundary.confirm(CONSUMER, 5)
            await link.drain()
        assert await hq.ids("plant") == ["plant-5", with_artifact, *before, *after]
        assert await hq.artifact("B1") == b"report" * 1000

    play(story)


@pytest.mark.parametrize("into", ["store", "url"])
def test_forward_once_drains_the_source_and_says_what_it_did(tmp_path: Path, into: str) -> None:
    with (
        boundary_server(tmp_path / "plant") as source,
        boundary_server(tmp_path / "hq") as url,
        BoundaryClient(source) as plant,
    ):
        target = str(tmp_path / "store") if into == "store" else url
        once = ("forward", "--from", source, "--to", target, "--zone", "hq", "--once")
        for number in range(4):
            origin = "hq" if number == 2 else "plant"
            plant.append(
                envelope_for(f"m{number}", from_zone=origin, to_zone="hq"), fact_of("a:b", "c", number)
            )
        result = run(*once)
        assert (result.exit_code, result.stdout) == (0, "3 appended, 1 of this zone itself.\n"), result.output
        assert run(*once).stdout == "nothing new.\n"
        reported = json.loads(run(*once, "--consumer", "again", "--json").stdout)
        assert reported == {"appended": 0, "duplicate": 3, "own": 1, "not_for_us": 0, "missed": 0}
        plant.append(envelope_for("m0-again", from_zone="plant-b", to_zone="labs"), fact_of("a:b", "c", 1))
        assert run(*once, "--to-zone", "hq").stdout == "1 for other zones.\n"
        refused = run(*once, "--consumer", "third", "--from-zone", "plant")
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "'m0-again' at offset 5 of the source cannot be taken" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--from", NOWHERE, "--to", "{tmp}/hq"), 1, "cannot be reached"),
        (("--from", "nonsense", "--to", "{tmp}/hq"), 2, "URL of a boundary"),
        (("--from", NOWHERE, "--to", "ftp://x"), 2, "is not the scheme of a store"),
        (("--from", NOWHERE, "--to", "{tmp}/hq", "--consumer", "Zürich"), 2, "must be ASCII"),
    ],
)
def test_forward_once_says_what_is_wrong(
    tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    given = [each.format(tmp=tmp_path) for each in arguments]
    result = run("forward", *given, "--zone", "hq", "--once")
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_forward_goes_on_until_it_is_asked_to_stop(tmp_path: Path) -> None:
    with boundary_server(tmp_path / "plant") as source, boundary_server(tmp_path / "hq") as url:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "onceward", "boundary", "forward"),
                *("--from", source, "--to", url, "--zone", "hq"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            with BoundaryClient(source) as plant, BoundaryClient(url) as hq:
                for number in range(3):
                    message = envelope_for(f"m{number}", from_zone="plant", to_zone="hq")
                    plant.append(message, fact_of("a:b", "c", number))
                    until(lambda number=number: len(hq.fetch("watcher").facts) > number)
            process.send_signal(signal.SIGTERM)
            said, log = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
        assert (process.returncode, said) == (0, "3 appended.\n")
        assert [json.loads(line)["message"] for line in log.splitlines()] == [f"link {source} is up"]


def test_pieces_of_an_object_come_when_they_are_wanted(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4000
    with boundary_server(tmp_path / "plant") as url, BoundaryClient(url) as client:
        client.put("batch-files", "B1", content)
        assert b"".join(client.get_pieces("batch-files", "B1")) == content

        async def by_asyncio() -> bytes:
            async with AsyncBoundaryClient(url) as client:
                return b"".join([piece async for piece in client.get_pieces("batch-files", "B1")])

        assert asyncio.run(by_asyncio()) == content

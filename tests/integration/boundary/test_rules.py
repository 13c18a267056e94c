"""What a boundary accepts, serves and refuses, whatever its store and its protocol."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onceward.boundary.boundary import Boundary, BoundarySettings
from onceward.boundary.errors import (
    ArtifactMissing,
    ConflictingDuplicate,
    InvalidArgument,
    NotFound,
    OffsetOutOfRange,
)
from onceward.boundary.model import (
    LARGEST_FACT,
    LARGEST_PAGE,
    Appended,
    Envelope,
    Fact,
    Gap,
    envelope_for,
    fact_of,
)
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.boundary.v1.boundary_connect import BoundaryService
from onceward.boundary.wire import Record

ENVELOPE = envelope_for("m1", from_zone="plant-a", to_zone="hq")
FACT = fact_of("batch:B1042", "completed", {"litres": 480})


class Given:
    """A boundary for one test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, body: Callable[[Boundary], Awaitable[None]], **settings: Any) -> None:
        async def main() -> None:
            store = SqliteBoundaryStore(self._directory)
            try:
                await body(Boundary(store, BoundarySettings(**settings)))
            finally:
                await store.close()

        asyncio.run(main())


@pytest.fixture
def given(tmp_path: Path) -> Given:
    return Given(tmp_path)


async def append(boundary: Boundary, *ids: str) -> None:
    for message_id in ids:
        await boundary.append(envelope_for(message_id, from_zone="a", to_zone="b"), FACT)


def offsets(page: tuple[list[Record], Gap | None]) -> list[int]:
    return [record[0] for record in page[0]]


@pytest.mark.req("BC-01")
def test_facts_come_ascending_from_the_cursor_and_come_again_until_they_are_confirmed(given: Given) -> None:
    async def body(boundary: Boundary) -> None:
        await append(boundary, *(f"m{number}" for number in range(10)))
        assert offsets(await boundary.fetch("c", 4)) == [1, 2, 3, 4]
        assert offsets(await boundary.fetch("c", 4)) == [1, 2, 3, 4]
        assert await boundary.confirm("c", 3) == 3
        assert offsets(await boundary.fetch("c", 4)) == [4, 5, 6, 7]

    given(body)


@pytest.mark.req("BC-01")
def test_pages_over_a_long_log_leave_nothing_out_and_bring_nothing_twice(given: Given) -> None:
    async def body(boundary: Boundary) -> None:
        ids = [f"m{number}" for number in range(2500)]
        await asyncio.gather(*(append(boundary, each) for each in ids))
        seen: list[int] = []
        while page := offsets(await boundary.fetch("c", 5000)):
            assert len(page) <= LARGEST_PAGE
            seen += page
            await boundary.confirm("c", page[-1])
        assert seen == list(range(1, 2501))

    given(body)


@pytest.mark.req("BC-02")
def test_two_names_go_their_own_ways_and_two_readers_of_one_name_see_the_same(given: Given) -> None:
    async def body(boundary: Boundary) -> None:
        await append(boundary, "m1", "m2")
        await boundary.fetch("one", 10)
        await boundary.confirm("one", 2)
        assert offsets(await boundary.fetch("one", 10)) == []
        assert offsets(await boundary.fetch("two", 10)) == [1, 2]
        both = await asyncio.gather(boundary.fetch("two", 10), boundary.fetch("two", 10))
        assert offsets(both[0]) == offsets(both[1]) == [1, 2]

    given(body)


@pytest.mark.req("BC-03")
def test_a_confirm_is_cumulative_never_goes_back_and_does_not_pass_the_end(given: Given) -> None:
    async def body(boundary: Boundary) -> None:
        await append(boundary, "m1", "m2", "m3")
        await boundary.fetch("c", 1)
        assert await boundary.confirm("c", 2) == 2
        assert await boundary.confirm("c", 1) == 2
        assert await boundary.confirm("c", 0) == 2
        with pytest.raises(OffsetOutOfRange, match="the last fact is 3") as raised:
            await boundary.confirm("c", 4)
        assert raised.value.field == "offset"
        assert await boundary.confirm("c", 3) == 3

    given(body)


def test_a_name_that_has_never_fetched_cannot_confirm(given: Given) -> None:
    async def body(boundary: Boundary) -> None:
        await append(boundary, "m1")
        with pytest.raises(NotFound, match="never fetched"):
            await boundary.confirm("c", 1)

    given(body)


def test_names_are_not_made_by_fetching_where_consumers_are_strict(given: Given) -> None:
    async def body(boundary: Boundary) -> None:
        with pytest.raises(NotFound, match="there is no consumer 'c'"):
            await boundary.fetch("c", 1)
        await boundary.store.position("c", create=True)
        assert offsets(await boundary.fetch("c", 1)) == []

    given(body, strict_consumers=True)


@pytest.mark.req("BC-15")
def test_a_retry_answers_the_first_offset_though_keys_and_white_space_differ(given: Given) -> None:
    async def body(boundary: Boundary) -> None:
        first = Fact(subject="batch:B1", predicate="done", object_json='{"a":1,"b":[2]}')
        again = Fact(subject="batch:B1", predicate="done", object_json='{ "b": [2.0],\n "a": 1 }')
        later = msgspec.structs.replace(ENVELOPE, produced_at_unix_ms=5, labels={"site": "x"})
        assert await boundary.append(ENVELOPE, first) == Appended(1)
        assert await boundary.append(later, again) == Appended(1, duplicate=True)
        assert (await boundary.store.bounds()).last == 1

    given(body)


@pytest.mark.req("BC-15")
@pytest.mark.parametrize("change", ["subject", "predicate", "object", "reference", "zone"])
def test_a_known_id_with_other_content_is_refused_and_the_log_stays(given: Given, change: str) -> None:
    async def body(boundary: Boundary) -> None:
        ref = {"bucket": "b", "key": "k", "digest": "sha256:" + "0" * 64, "size": 1, "media_type": "x"}
        await boundary.append(ENVELOPE, fact_of("batch:B1", "done", ref))
        envelope, fact = {
            "subject": (ENVELOPE, fact_of("batch:B2", "done", ref)),
            "predicate": (ENVELOPE, fact_of("batch:B1", "begun", ref)),
            "object": (ENVELOPE, fact_of("batch:B1", "done", {})),
            "reference": (ENVELOPE, fact_of("batch:B1", "done", {**ref, "digest": "sha256:" + "1" * 64})),
            "zone": (msgspec.structs.replace(ENVELOPE, to_zone="x"), fact_of("batch:B1", "done", ref)),
        }[change]
        with pytest.raises(ConflictingDuplicate, match="at offset 1"):
            await boundary.append(envelope, fact)
        assert (await boundary.store.bounds()).last == 1

    given(body)


@pytest.mark.req("BC-14")
@pytest.mark.parametrize("produced_at", [1, 4_102_444_800_000])
def test_facts_of_long_ago_and_of_the_future_are_like_others(given: Given, produced_at: int) -> None:
    async def body(boundary: Boundary) -> None:
        await boundary.append(msgspec.structs.replace(ENVELOPE, produced_at_unix_ms=produced_at), FACT)
        assert offsets(await boundary.fetch("c", 1)) == [1]

    given(body)


@pytest.mark.parametrize("value", ["null", "17", '"text"', "[]", '{"no":"schema says so"}'])
def test_what_an_object_means_is_not_the_boundarys_business(given: Given, value: str) -> None:
    async def body(boundary: Boundary) -> None:
        fact = Fact(subject="batch:B1", predicate="done", object_json=value)
        assert (await boundary.append(ENVELOPE, fact)).offset == 1

    given(body)


@pytest.mark.req("BC-18")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("envelope.message_id", ""),
        ("envelope.message_id", "x" * 401),
        ("envelope.message_id", "kluč"),
        ("envelope.message_id", "a\nb"),
        ("envelope.message_id", " a"),
        ("envelope.from_zone", ""),
        ("envelope.to_zone", "a\x00b"),
        ("envelope.produced_at_unix_ms", 0),
        ("envelope.produced_at_unix_ms", -5),
        ("envelope.produced_at_unix_ms", 2**63),
        ("envelope.correlation_id", "ü"),
        ("envelope.causation_id", "\x7f"),
        ("envelope.object_media_type", "x" * 1001),
        ("envelope.object_schema", "a\tb"),
        ("envelope.labels", {"": "x"}),
        ("envelope.labels", {"x": "y" * 1001}),
        ("envelope.labels", {"x": "\ud800"}),
        ("envelope.labels.retention", {"retention": "forever"}),
        ("fact.subject", ""),
        ("fact.subject", "B1042"),
        ("fact.subject", "Batch:B1042"),
        ("fact.subject", "batch:a/b/c"),
        ("fact.subject", "batch:with blank"),
        ("fact.subject", "batch:\ud800"),
        ("fact.predicate", ""),
        ("fact.predicate", "stepCompleted"),
        ("fact.predicate", "step__completed"),
        ("fact.object_json", ""),
        ("fact.object_json", "{"),
        ("fact.object_json", '"' + "x" * LARGEST_FACT + '"'),
        ("fact.object_json", '"' + "ü" * (LARGEST_FACT // 2) + '"'),
    ],
)
def test_a_malformed_field_is_named_and_nothing_is_stored(given: Given, field: str, value: Any) -> None:
    part, name, *_ = field.split(".")

    async def body(boundary: Boundary) -> None:
        envelope: Envelope = ENVELOPE
        fact: Fact = FACT
        if part == "envelope":
            envelope = msgspec.structs.replace(envelope, **{name: value})
        else:
            fact = msgspec.structs.replace(fact, **{name: value})
        with pytest.raises(InvalidArgument) as raised:
            await boundary.append(envelope, fact)
        assert raised.value.field == field
        assert str(raised.value).startswith(field)
        assert (await boundary.store.bounds()).last == 0

    given(body)


@pytest.mark.req("BC-18")
def test_limits_offsets_and_names_that_make_no_sense_are_named(given: Given) -> None:
    async def body(boundary: Boundary) -> None:
        for limit in (0, -1):
            with pytest.raises(InvalidArgument, match="limit must be 1 or more"):
                await boundary.fetch("c", limit)
        for name in ("", "x" * 401, "a\tb", "ü"):
            with pytest.raises(InvalidArgument, match="consumer_name"):
                await boundary.fetch(name, 1)
        with pytest.raises(InvalidArgument, match="offset must be 0 or more"):
            await boundary.confirm("c", -1)
        for bucket in ("", "..", "a/b", "A", "-a"):
            with pytest.raises(InvalidArgument, match="bucket"):
                await boundary.put(bucket, "k", pieces(b""), "")
        for key in ("", "a\x00b", "x" * 1001):
            with pytest.raises(InvalidArgument, match="key"):
                await boundary.get("b", key)
        assert await boundary.store.cursors() == []

    given(body)


@pytest.mark.req("BC-17")
def test_a_fact_naming_a_missing_object_is_refused_where_that_is_the_policy(given: Given) -> None:
    ref = {
        "bucket": "b",
        "key": "k",
        "digest": f"sha256:{sha256(b'x').hexdigest()}",
        "size": 1,
        "media_type": "x",
    }
    fact = fact_of("batch:B1", "photographed", ref)

    async def body(boundary: Boundary) -> None:
        with pytest.raises(ArtifactMissing, match="object b/k does not exist here") as raised:
            await boundary.append(ENVELOPE, fact)
        assert raised.value.field == "fact.object_json"
        await boundary.put("b", "k", pieces(b"x"), "x")
        assert (await boundary.append(ENVELOPE, fact)).offset == 1

    given(body, require_artifacts=True)


@pytest.mark.req("BC-17")
def test_a_fact_naming_an_object_with_another_digest_is_refused_where_that_is_the_policy(
    given: Given,
) -> None:
    ref = {"bucket": "b", "key": "k", "digest": "sha256:" + "0" * 64}

    async def body(boundary: Boundary) -> None:
        await boundary.put("b", "k", pieces(b"x"), "x")
        with pytest.raises(InvalidArgument, match="but that object has sha256:2d711642") as raised:
            await boundary.append(ENVELOPE, fact_of("batch:B1", "photographed", ref))
        assert raised.value.field == "fact.object_json"

    given(body, require_artifacts=True)


@pytest.mark.req("BC-18")
@pytest.mark.parametrize("media_type", ["text/\0plain", "a" * 5000, " text/plain", "text\nplain"])
def test_a_media_type_is_checked_like_every_other_text(given: Given, media_type: str) -> None:
    async def body(boundary: Boundary) -> None:
        with pytest.raises(InvalidArgument, match="media_type"):
            await boundary.put("b", "k", pieces(b"x"), media_type)

    given(body)


@pytest.mark.req("BC-18")
def test_a_fact_naming_an_object_that_cannot_be_is_refused_by_its_field(given: Given) -> None:
    async def body(boundary: Boundary) -> None:
        with pytest.raises(InvalidArgument, match="does not name an object: bucket must be") as raised:
            await boundary.append(ENVELOPE, fact_of("batch:B1", "filed", {"bucket": "../..", "key": "k"}))
        assert raised.value.field == "fact.object_json"

    given(body, require_artifacts=True)


@pytest.mark.req("BC-17")
def test_without_that_policy_the_fact_is_taken(given: Given) -> None:
    async def body(boundary: Boundary) -> None:
        await boundary.append(ENVELOPE, fact_of("batch:B1", "photographed", {"bucket": "b", "key": "k"}))

    given(body)


@pytest.mark.req("BC-21")
def test_every_hole_that_expiry_left_is_reported_with_the_page_behind_it(given: Given) -> None:
    async def body(boundary: Boundary) -> None:
        for number, kept in enumerate("xx.x...xx", 1):
            labels = {"retention": "audit"} if kept == "x" else {}
            envelope = envelope_for(f"m{number}", from_zone="a", to_zone="b", labels=labels)
            await boundary.append(envelope, FACT)
        await boundary.register("c")
        await boundary.store.expire({"operational": 10**15})
        reported = []
        while True:
            records, gap = await boundary.fetch("c", 100)
            if not records:
                break
            reported.append(([record[0] for record in records], gap))
            await boundary.confirm("c", records[-1][0])
        assert reported == [([1, 2], None), ([4], Gap(3, 3)), ([8, 9], Gap(5, 7))]

    given(body)


@pytest.mark.req("BC-21")
def test_a_gap_up_to_the_end_of_the_log_is_reported_with_an_empty_page(given: Given) -> None:
    async def body(boundary: Boundary) -> None:
        await boundary.fetch("c", 100)
        await append(boundary, "m1", "m2")
        await boundary.store.expire({"operational": 10**15})
        assert await boundary.fetch("c", 100) == ([], Gap(1, 2))
        assert await boundary.confirm("c", 2) == 2
        assert await boundary.fetch("c", 100) == ([], None)

    given(body)


def test_the_service_has_no_way_to_change_or_delete_facts_and_objects() -> None:
    calls = {
        name for name, value in vars(BoundaryService).items() if inspect.isfunction(value) and name[0] != "_"
    }
    assert calls == {
        "append_fact", "append_facts", "fetch_facts", "confirm_receipt", "put_object", "get_object",
        "put_object_stream", "get_object_stream", "remove_consumer",
    }  # fmt: skip


async def pieces(blob: bytes) -> AsyncIterator[bytes]:
    yield blob

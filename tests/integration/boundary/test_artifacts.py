"""Artifacts: found by a fact's reference, fetched, verified, waited for; and put before the fact that names them."""

from __future__ import annotations

import hashlib
import io
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from onceward.boundary import (
    ArtifactMissingError,
    BadReferenceError,
    Fact,
    IntegrityError,
    envelope_for,
    fact_of,
)
from onceward.boundary.artifacts import reference_of
from onceward.boundary.boundary import BoundarySettings
from onceward.boundary.errors import (
    ArtifactMissing,
    ConflictingDuplicate,
    InvalidArgument,
    NotFound,
    ObjectConflict,
    Unavailable,
)
from onceward.errors import ConfigurationError
from tests.support.boundary.consumer_world import Awaited, BoundaryWorld

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

BLOB = b"%PDF a report"
SCHEDULE = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6]
"""Seconds: the waits between the guide's ten calls."""


@pytest.fixture
def world(sqlite: Database, tmp_path: Path) -> Iterator[BoundaryWorld]:
    with BoundaryWorld(sqlite, tmp_path) as made:
        yield made


def digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def report(blob: bytes = BLOB, **changes: Any) -> Fact:
    """A fact that refers to batch-files/B1/report.pdf."""
    value = {
        "bucket": "batch-files",
        "key": "B1/report.pdf",
        "digest": digest(blob),
        "size": len(blob),
        "media_type": "application/pdf",
    }
    return fact_of("batch:B1", "report_filed", {**value, **changes})


def put(world: BoundaryWorld, blob: bytes = BLOB) -> None:
    world.admin.put("batch-files", "B1/report.pdf", blob, "application/pdf")


def append(world: BoundaryWorld, fact: Fact) -> None:
    world.admin.append(envelope_for("report-1", from_zone="a", to_zone="b"), fact)


def consume(world: BoundaryWorld) -> list[bytes]:
    """A consumer whose handler fetches the artifact of each fact."""
    fetched: list[bytes] = []

    async def read(fact: Any, _: Awaited) -> None:
        result = world.client.thing.fetch_artifact(fact)
        fetched.append(await result if world.asynchronous else result)

    world.consume(read)
    return fetched


# ── the reference ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-12")
def test_the_reference_is_read_from_the_objects_five_fields_whatever_else_it_has() -> None:
    ref = reference_of(report(pages=3, file_name="report.pdf"))
    assert (ref.bucket, ref.key) == ("batch-files", "B1/report.pdf")
    assert (ref.digest, ref.size, ref.media_type) == (digest(BLOB), len(BLOB), "application/pdf")


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"bucket": None}, "bucket"),
        ({"size": "12"}, "size"),
        ({"digest": "md5:" + "0" * 32}, "sha256:<64"),
        ({"digest": hashlib.sha256(BLOB).hexdigest()}, "sha256:<64"),
        ({"digest": "sha256:" + "g" * 64}, "sha256:<64"),
    ],
)
def test_a_bad_reference_is_reported_with_the_fact_and_the_field(
    changes: dict[str, Any], reported: str
) -> None:
    with pytest.raises(BadReferenceError, match=reported) as caught:
        reference_of(report(**changes))
    assert "batch:B1 report_filed" in str(caught.value)


@pytest.mark.parametrize("field", ["bucket", "key", "digest", "size", "media_type"])
def test_every_field_of_a_reference_is_needed(field: str) -> None:
    value = {name: each for name, each in report().object.items() if name != field}
    with pytest.raises(BadReferenceError, match=field):
        reference_of(fact_of("batch:B1", "report_filed", value))


# ── fetching and verifying ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-12")
@pytest.mark.parametrize("spelling", [str, str.upper, lambda text: "sha256:" + text[7:].upper()])
def test_an_artifact_that_is_what_the_fact_says_is_handed_over_and_confirmed(
    world: BoundaryWorld, spelling: Any
) -> None:
    put(world)
    append(world, report(digest=spelling(digest(BLOB))))
    assert consume(world) == [BLOB]
    assert world.cursor() == 1
    assert world.waits == []


@pytest.mark.req("BC-12")
@pytest.mark.parametrize(
    ("changes", "reported"),
    [({"digest": digest(b"other")}, "digest"), ({"size": len(BLOB) + 1}, "bytes, but the fact says")],
)
def test_an_artifact_with_another_digest_or_size_is_an_integrity_error_and_nothing_is_confirmed(
    world: BoundaryWorld, changes: dict[str, Any], reported: str
) -> None:
    put(world)
    append(world, report(**changes))
    with pytest.raises(IntegrityError, match=reported) as caught:
        consume(world)
    assert "batch-files/B1/report.pdf" in str(caught.value)
    assert world.server.count("confirm") == 0
    assert world.server.count("get") == 1, "wrong bytes are not retried"


def test_without_verification_the_bytes_are_handed_over_as_they_come(world: BoundaryWorld) -> None:
    put(world)
    wrong = report(digest=digest(b"other"))
    assert world.client.fetch_artifact(wrong, verify=False) == BLOB
    with pytest.raises(IntegrityError):
        world.client.fetch_artifact(wrong)


# ── waiting for it ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-13")
@pytest.mark.parametrize("kind", [NotFound, Unavailable])
def test_after_exactly_ten_calls_in_vain_it_is_missing_and_nothing_is_confirmed(
    world: BoundaryWorld, kind: type[Exception]
) -> None:
    append(world, report())
    if kind is Unavailable:
        world.server.failing["get"] = [Unavailable("the disk is away") for _ in range(20)]
    with pytest.raises(ArtifactMissingError, match="object batch-files/B1/") as caught:
        consume(world)
    assert isinstance(caught.value.__cause__, kind)
    assert world.server.count("get") == 10
    assert world.waits == pytest.approx(SCHEDULE)
    assert sum(world.waits) == pytest.approx(51.1)
    assert world.server.count("confirm") == 0
    assert world.cursor() == 0


@pytest.mark.req("BC-13")
@pytest.mark.parametrize("late", [1, 4, 9])
def test_an_artifact_that_arrives_after_its_fact_is_waited_for(world: BoundaryWorld, late: int) -> None:
    append(world, report())

    def arrive() -> None:
        if len(world.waits) == late:
            put(world)

    world.on_wait = arrive
    assert consume(world) == [BLOB]
    assert world.waits == pytest.approx(SCHEDULE[:late])
    assert world.server.count("get") == late + 1
    assert world.cursor() == 1


@pytest.mark.req("BC-13")
def test_a_boundary_that_is_away_for_a_while_is_waited_for(world: BoundaryWorld) -> None:
    put(world)
    world.server.stop()

    def come_back() -> None:
        if len(world.waits) == 3:
            world.server.start()

    world.on_wait = come_back
    assert world.client.fetch_artifact(report()) == BLOB
    assert world.waits == pytest.approx(SCHEDULE[:3])


def test_what_will_not_pass_by_itself_is_not_tried_again(world: BoundaryWorld) -> None:
    with pytest.raises(InvalidArgument, match="bucket"):
        world.client.fetch_artifact(report(bucket="No Such"))
    assert world.waits == []


# ── into a file ─────────────────────────────────────────────────────────────────────────────────────────


def test_an_artifact_goes_to_a_path_which_it_takes_when_it_is_whole(
    world: BoundaryWorld, tmp_path: Path
) -> None:
    put(world)
    target = tmp_path / "out" / "report.pdf"
    target.parent.mkdir()
    ref = world.client.fetch_artifact_to(report(), target)
    assert ref.size == len(BLOB)
    assert target.read_bytes() == BLOB
    assert os.listdir(target.parent) == ["report.pdf"]


def test_a_fetch_that_fails_leaves_no_file_and_an_older_one_as_it_was(
    world: BoundaryWorld, tmp_path: Path
) -> None:
    put(world)
    target = tmp_path / "out" / "report.pdf"
    target.parent.mkdir()
    wrong = report(digest=digest(b"other"))
    with pytest.raises(IntegrityError):
        world.client.fetch_artifact_to(wrong, target)
    assert os.listdir(target.parent) == []
    target.write_bytes(b"older")
    with pytest.raises(ArtifactMissingError):
        world.client.fetch_artifact_to(report(key="nowhere"), str(target))
    assert os.listdir(target.parent) == ["report.pdf"]
    assert target.read_bytes() == b"older"


def test_an_open_file_is_written_from_where_it_stands_and_cut_back_if_it_fails(world: BoundaryWorld) -> None:
    put(world)
    file = io.BytesIO(b"head:")
    file.seek(5)
    with pytest.raises(IntegrityError):
        world.client.fetch_artifact_to(report(digest=digest(b"other")), file)
    assert file.getvalue() == b"head:"
    world.client.fetch_artifact_to(report(), file)
    assert file.getvalue() == b"head:" + BLOB


def test_a_download_that_breaks_off_begins_anew(world: BoundaryWorld) -> None:
    blob = os.urandom(2_000_000)
    put(world, blob)
    world.server.break_after = 3
    file = io.BytesIO()
    world.client.fetch_artifact_to(report(blob), file)
    assert file.getvalue() == blob
    assert world.waits == [0.1]
    world.server.break_after = 3
    assert world.client.fetch_artifact(report(blob)) == blob


def test_a_file_that_cannot_go_back_is_refused(world: BoundaryWorld) -> None:
    reading, writing = os.pipe()
    with (
        os.fdopen(reading),
        os.fdopen(writing, "wb") as file,
        pytest.raises(ConfigurationError, match="seekable"),
    ):
        world.client.fetch_artifact_to(report(), file)


def test_a_large_artifact_goes_up_and_down_without_being_held_in_memory(
    world: BoundaryWorld, tmp_path: Path
) -> None:
    size = 48 * 1024 * 1024
    source, target = tmp_path / "source", tmp_path / "target"
    check = hashlib.sha256()
    with source.open("wb") as file:
        for number in range(48):
            piece = bytes([number]) * (1024 * 1024)
            check.update(piece)
            file.write(piece)
    fact = report(digest=f"sha256:{check.hexdigest()}", size=size)
    tracemalloc.start()
    try:
        ref = world.client.put_file("batch-files", "B1/report.pdf", source)
        world.client.fetch_artifact_to(fact, target)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert ref.digest == fact.object["digest"]
    assert target.stat().st_size == size
    assert peak < size / 3, "client and server together, both in this process"


# ── producing ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def strict(sqlite: Database, tmp_path: Path) -> Iterator[BoundaryWorld]:
    """A boundary that refuses facts whose artifact is missing."""
    with BoundaryWorld(sqlite, tmp_path, BoundarySettings(require_artifacts=True)) as made:
        yield made


PLACE = {"bucket": "batch-files", "key": "B1/report.pdf", "media_type": "application/pdf"}


@pytest.mark.parametrize("kind", ["bytes", "a file"])
def test_an_artifact_is_put_before_the_fact_that_refers_to_it(
    strict: BoundaryWorld, kind: str, tmp_path: Path
) -> None:
    envelope = envelope_for("report-1", from_zone="a", to_zone="b")
    with pytest.raises(ArtifactMissing):
        strict.client.append(envelope, report())
    strict.server.calls.clear()
    path = tmp_path / "report.pdf"
    path.write_bytes(BLOB)
    artifact = BLOB if kind == "bytes" else path
    made = strict.client.append_with_artifact(
        envelope, "batch:B1", "report_filed", artifact, more={"pages": 3}, **PLACE
    )
    assert strict.server.names() == ["put", "append"]
    [fact] = strict.admin.fetch("reader").facts
    assert (fact.offset, fact.envelope.object_media_type) == (made.offset, "application/pdf")
    assert fact.fact.object == {**report().object, "pages": 3}
    assert strict.client.fetch_artifact(fact) == BLOB


def test_repeating_the_whole_is_safe_and_other_bytes_or_another_fact_are_refused(
    strict: BoundaryWorld,
) -> None:
    def file_report(blob: bytes, **more: Any) -> Any:
        envelope = envelope_for("report-1", from_zone="a", to_zone="b")
        return strict.client.append_with_artifact(
            envelope, "batch:B1", "report_filed", blob, more=more, **PLACE
        )

    strict.server.losing["append"].append(Unavailable("the link was cut"))
    with pytest.raises(Unavailable):
        file_report(BLOB)
    again = file_report(BLOB)
    assert (again.offset, again.duplicate) == (1, True)
    with pytest.raises(ObjectConflict):
        file_report(b"other")
    with pytest.raises(ConflictingDuplicate):
        file_report(BLOB, pages=4)
    assert len(strict.admin.fetch("reader").facts) == 1


def test_an_upload_that_fails_appends_nothing(strict: BoundaryWorld, tmp_path: Path) -> None:
    envelope = envelope_for("report-1", from_zone="a", to_zone="b")
    strict.server.failing["put"].append(Unavailable("full"))
    with pytest.raises(Unavailable, match="full"):
        strict.client.append_with_artifact(envelope, "batch:B1", "report_filed", BLOB, **PLACE)
    with pytest.raises(FileNotFoundError):
        strict.client.append_with_artifact(envelope, "batch:B1", "report_filed", tmp_path / "none", **PLACE)
    with pytest.raises(InvalidArgument, match="bucket, size"):
        strict.client.append_with_artifact(
            envelope, "batch:B1", "report_filed", BLOB, more={"size": 1, "bucket": "x"}, **PLACE
        )
    assert strict.server.count("append") == 0

"""Bundles: facts and artifacts in a file. Damaged bundles are refused completely; repeated imports are harmless."""

from __future__ import annotations

import hashlib
import json
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from onceward.boundary import BoundaryClient, StoredFact, envelope_for, fact_of
from onceward.boundary.artifacts import as_reference
from onceward.boundary.bundle import MAGIC
from onceward.boundary.model import ObjectRef
from onceward.cli.main import app
from tests.support.boundary.server import boundary_server

WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}


class Place:
    """A zone's directory, and a server for it."""

    def __init__(self, directory: Path, url: str, client: BoundaryClient) -> None:
        self.directory = directory
        self.url = url
        self.client = client

    @property
    def facts(self) -> list[StoredFact]:
        return list(self.client.fetch("looking", 1000).facts)

    @property
    def ids(self) -> list[str]:
        return [fact.message_id for fact in self.facts]

    def say(self, message_id: str, value: Any = 1, zone: str = "plant") -> None:
        self.client.append(
            envelope_for(message_id, from_zone=zone, to_zone="hq"), fact_of("batch:B1", "counted", value)
        )


@contextmanager
def place(directory: Path) -> Iterator[Place]:
    with boundary_server(directory) as url, BoundaryClient(url) as client:
        yield Place(directory, url, client)


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Place]:
    """Five facts, two of them with an artifact, and one of them from hq."""
    with place(tmp_path / "plant") as made:
        first = made.client.put("batch-files", "B1", b"first " * 1000, "text/plain")
        empty = made.client.put("batch-files", "B2", b"", "text/plain")
        for number, value in enumerate([1, as_reference(first), as_reference(empty), as_reference(first)], 1):
            made.say(f"m{number}", value)
        made.say("m5", zone="hq")
        yield made


@pytest.fixture
def hq(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path / "hq") as made:
        yield made


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return tmp_path / "plant.bundle"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["boundary", *map(str, arguments)], env=WIDE)


def said(*arguments: object) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def refused(*arguments: object, code: int = 1) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


def export(plant: Place, bundle: Path, *more: object) -> str:
    return said("export", bundle, "--store", plant.directory, "--zone", "plant", *(more or ("--since", 0)))


# ── there and back ──────────────────────────────────────────────────────────────────────────────────────


def test_facts_and_artifacts_arrive_once_and_in_order(plant: Place, hq: Place, bundle: Path) -> None:
    reported = export(plant, bundle)
    assert reported == f"Wrote 5 facts and 2 artifacts to {bundle}, offsets 1 to 5.\n"
    taking = ("import", bundle, "--zone", "hq", "--url", hq.url)
    assert said(*taking) == "4 appended, 0 already there, 1 of this zone itself, up to offset 5 of plant.\n"
    assert said(*taking) == "0 appended, 4 already there, 1 of this zone itself, up to offset 5 of plant.\n"
    assert hq.ids == ["m1", "m2", "m3", "m4"]
    sent, arrived = plant.facts[:4], hq.facts
    assert [(each.envelope, each.fact) for each in arrived] == [(each.envelope, each.fact) for each in sent]
    assert hq.client.get("batch-files", "B1") == plant.client.get("batch-files", "B1")
    assert hq.client.get("batch-files", "B2") == plant.client.get("batch-files", "B2")


def test_a_store_takes_it_without_a_server(plant: Place, tmp_path: Path, bundle: Path) -> None:
    export(plant, bundle)
    taking = ("import", bundle, "--zone", "hq", "--store", tmp_path / "hq", "--json")
    done = {"appended": 4, "duplicates": 0, "own": 1, "skipped": 0, "missed": 0, "zone": "plant", "last": 5}
    assert json.loads(said(*taking)) == done
    with place(tmp_path / "hq") as hq:
        assert hq.ids == ["m1", "m2", "m3", "m4"]
        assert hq.client.get("batch-files", "B1")[0] == b"first " * 1000


def test_since_and_through_choose_facts(plant: Place, hq: Place, bundle: Path) -> None:
    export(plant, bundle, "--since", 1, "--through", 3)
    said("import", bundle, "--zone", "hq", "--url", hq.url)
    assert hq.ids == ["m2", "m3"]
    reported = json.loads(export(plant, bundle, "--since", 3, "--through", 99, "--force", "--json"))
    assert reported == {
        "zone": "plant",
        "since": 3,
        "last": 5,
        "facts": 2,
        "objects": 1,
        "missed": 0,
        "file": str(bundle),
    }
    said("import", bundle, "--zone", "hq", "--url", hq.url)
    assert hq.ids == ["m2", "m3", "m4"]


def test_a_consumer_remembers_what_the_other_side_has(plant: Place, bundle: Path) -> None:
    plant.client.fetch("zone:hq")
    for confirmed in (0, 0, 3):
        plant.client.confirm("zone:hq", confirmed)
        export(plant, bundle, "--consumer", "zone:hq", "--force", "--json")
        reported = json.loads(export(plant, bundle, "--consumer", "zone:hq", "--force", "--json"))
        assert (reported["since"], reported["facts"]) == (confirmed, 5 - confirmed)
    plant.client.confirm("zone:hq", 5)
    bundle.unlink()
    assert export(plant, bundle, "--consumer", "zone:hq") == "Nothing new; no file was written.\n"
    assert not bundle.exists()


def test_facts_that_had_expired_are_reported_on_both_sides(plant: Place, hq: Place, bundle: Path) -> None:
    with place(plant.directory.with_name("other")) as other:
        for number in range(1, 7):
            other.say(f"m{number}")
        _remove(other, 1, 2, 4)
        result = run("export", bundle, "--store", other.directory, "--zone", "plant", "--since", 0)
    assert result.stderr == "GAP: 3 facts had expired and are not in the bundle\n"
    result = run("import", bundle, "--zone", "hq", "--url", hq.url)
    assert result.exit_code == 0
    assert "GAP: 3 facts had expired before the bundle was written" in result.stderr
    assert hq.ids == ["m3", "m5", "m6"]


def _remove(place: Place, *offsets: int) -> None:
    with closing(sqlite3.connect(place.directory / "boundary.db")) as connection, connection:
        connection.executemany('DELETE FROM facts WHERE "offset" = ?', [(offset,) for offset in offsets])


def test_a_look_at_a_store_leaves_uploads_of_its_server_alone(plant: Place, bundle: Path) -> None:
    upload = plant.directory / "objects" / "incoming" / "on-its-way"
    upload.write_bytes(b"half")
    export(plant, bundle)
    assert upload.read_bytes() == b"half"


# ── damage ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_bundle_that_was_cut_short_anywhere_is_refused_whole(plant: Place, hq: Place, bundle: Path) -> None:
    export(plant, bundle)
    whole = bundle.read_bytes()
    for length in {0, 5, 27, 60, len(whole) // 2, len(whole) - 33, len(whole) - 32, len(whole) - 1}:
        bundle.write_bytes(whole[:length])
        reported = refused("import", bundle, "--zone", "hq", "--url", hq.url)
        assert "damaged or truncated" in reported or "not a bundle of facts" in reported
    bundle.write_bytes(whole + b"x")
    assert "damaged" in refused("import", bundle, "--zone", "hq", "--url", hq.url)
    _has_nothing(hq)


def test_a_bundle_that_was_altered_anywhere_is_refused_whole(plant: Place, hq: Place, bundle: Path) -> None:
    export(plant, bundle)
    whole = bundle.read_bytes()
    for position in [0, 30, len(whole) - 1, *random.sample(range(len(whole)), 8)]:
        altered = bytearray(whole)
        altered[position] ^= 1 << random.randrange(8)
        bundle.write_bytes(altered)
        assert run("import", bundle, "--zone", "hq", "--url", hq.url).exit_code == 1
    _has_nothing(hq)


def _has_nothing(hq: Place) -> None:
    assert hq.ids == []
    assert not list((hq.directory / "objects" / "names").iterdir())


PARTS = {
    "not JSON": [(b"H", b"{")],
    "no header": [(b"G", b"[1, 2]")],
    "a header of no offsets": [(b"H", b'{"zone":"z","since":9,"last":2}')],
    "a header before the first offset": [(b"H", b'{"zone":"z","since":-9,"last":2}')],
    "an unknown part": [(b"H", b'{"zone":"z","since":0,"last":1}'), (b"X", b"")],
    "not a fact": [(b"H", b'{"zone":"z","since":0,"last":1}'), (b"F", b"\xff\xff")],
    "an empty fact": [(b"H", b'{"zone":"z","since":0,"last":1}'), (b"F", b"")],
    "an object of no size": [
        (b"H", b'{"zone":"z","since":0,"last":1}'),
        (b"O", b'{"bucket":"b","key":"k","digest":"d","size":-99}'),
    ],
    "a gap of no offsets": [(b"H", b'{"zone":"z","since":0,"last":1}'), (b"G", b"[9, 2]")],
    "a gap before the first offset": [(b"H", b'{"zone":"z","since":0,"last":1}'), (b"G", b"[-9, 2]")],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
def test_a_file_with_the_right_digest_and_nonsense_in_it_is_refused(
    hq: Place, bundle: Path, parts: list[tuple[bytes, bytes]]
) -> None:
    body = MAGIC + b"".join(kind + len(part).to_bytes(8, "big") + part for kind, part in parts)
    bundle.write_bytes(body + hashlib.sha256(body).digest())
    assert "cannot be read" in refused("import", bundle, "--zone", "hq", "--url", hq.url)
    _has_nothing(hq)


def test_an_artifact_that_is_not_what_its_fact_says_is_never_carried(plant: Place, bundle: Path) -> None:
    ref = as_reference(plant.client.put("batch-files", "B3", b"abc"))
    plant.say("m6", {**ref, "digest": f"sha256:{hashlib.sha256(b'xyz').hexdigest()}"})
    reported = refused("export", bundle, "--store", plant.directory, "--zone", "plant", "--since", 0)
    assert "object batch-files/B3 has digest" in reported
    assert list(bundle.parent.glob("*bundle*")) == []


def test_a_fact_whose_artifact_is_missing_ends_an_export_that_leaves_no_file(
    plant: Place, bundle: Path
) -> None:
    missing = ObjectRef(bucket="batch-files", key="B9", digest="sha256:" + "0" * 64, size=1, media_type="a/b")
    plant.say("m6", as_reference(missing))
    reported = refused("export", bundle, "--store", plant.directory, "--zone", "plant", "--since", 0)
    assert (
        "offset 6 refers to object batch-files/B9, which does not exist here; put it, or leave the fact out"
        in reported
    )
    assert list(bundle.parent.glob("*bundle*")) == []
    export(plant, bundle, "--since", 0, "--through", 5)


# ── conflicts ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_conflict_ends_the_import_at_its_fact_and_skip_goes_on(
    plant: Place, hq: Place, bundle: Path
) -> None:
    hq.say("m3", "something else")
    export(plant, bundle)
    taking = ("import", bundle, "--zone", "hq", "--url", hq.url)
    reported = refused(*taking)
    assert (
        "fact 'm3' at offset 3 of the bundle cannot be imported: message_id 'm3' already exists at offset 1"
        in reported
    )
    assert "repeat with --skip 3" in reported
    assert hq.ids == ["m3", "m1", "m2", "m4"], "appended with their page"
    assert "3 already there" in said(*taking, "--skip", 3)
    assert hq.ids == ["m3", "m1", "m2", "m4"]
    assert hq.facts[0].fact.object == "something else"


def test_other_bytes_under_an_artifact_s_name_end_the_import_at_its_fact(
    plant: Place, tmp_path: Path, bundle: Path
) -> None:
    export(plant, bundle)
    with place(tmp_path / "hq") as hq:
        hq.client.put("batch-files", "B1", b"ours")
        reported = refused("import", bundle, "--zone", "hq", "--url", hq.url)
        assert (
            "fact 'm2' at offset 2 of the bundle cannot be imported: object batch-files/B1 already exists"
            in reported
        )
        assert hq.ids == ["m1"]
        assert "1 appended" in said(
            "import", bundle, "--zone", "hq", "--url", hq.url, "--skip", 2, "--skip", 4
        )
        assert hq.ids == ["m1", "m3"]
        assert hq.client.get("batch-files", "B1")[0] == b"ours"


# ── wrong arguments ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("export", "b", "--store", "{plant}", "--zone", "z"), 2, "either --since OFFSET or --consumer NAME"),
        (
            ("export", "b", "--store", "{plant}", "--zone", "z", "--consumer", "nobody"),
            1,
            "no consumer 'nobody'",
        ),
        (
            ("export", "b", "--store", "/nowhere", "--zone", "z", "--since", "0"),
            2,
            "there is no boundary in '/nowhere'",
        ),
        (("export", "{plant}", "--store", "{plant}", "--zone", "z", "--since", "0"), 2, "already exists"),
        (("export", "/nowhere/b", "--store", "{plant}", "--zone", "z", "--since", "0"), 1, "No such file"),
        (("import", "/nowhere", "--zone", "z"), 2, "/nowhere does not exist; name a bundle"),
        (("import", "{plant}", "--zone", "z"), 2, "not a regular file, which must be read twice"),
        (("import", "{text}", "--zone", "z"), 1, "not a bundle of facts"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    plant: Place, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    (tmp_path / "text").write_text("It was a dark and stormy night, and nobody had made a bundle.")
    given = [each.format(plant=plant.directory, text=tmp_path / "text") for each in arguments]
    reported = refused(*given, code=code)
    assert words in reported
    assert json.loads(run(*given, "--json").stdout)["error"] in reported


def test_an_import_into_nowhere_says_so_and_can_be_repeated(plant: Place, bundle: Path) -> None:
    export(plant, bundle)
    reported = refused("import", bundle, "--zone", "hq", "--url", "http://127.0.0.1:1")
    assert "cannot be reached: tcp connect error: Connection refused; check that it is running" in reported

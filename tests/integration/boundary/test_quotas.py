"""Quotas, and the size of a page, as callers see them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from onceward.boundary import BoundaryClient, envelope_for, fact_of
from onceward.boundary.boundary import BoundarySettings
from onceward.boundary.errors import InvalidArgument, NotFound, QuotaExceeded
from onceward.boundary.model import LARGEST_FACT, PAGE_BYTES, Fact, check_append
from onceward.boundary.v1 import boundary_pb as pb
from onceward.boundary.wire import page_bytes
from tests.support.boundary.server import boundary_process, boundary_server

SERVICE = "onceward.boundary.v1.BoundaryService"
SETTINGS = BoundarySettings(max_consumers=2, max_labels=3, max_objects=2, max_object_bytes=2_000_000)
FACT = fact_of("batch:B1", "done", 1)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[BoundaryClient]:
    with boundary_server(tmp_path, SETTINGS) as url, BoundaryClient(url) as client:
        yield client


# ── pages ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-37")
def test_a_grpc_client_gets_every_page_with_its_default_settings(tmp_path: Path) -> None:
    with boundary_process(tmp_path) as url, BoundaryClient(url) as client:
        for number in range(9):  # four of the largest facts fit into 4 MiB only without what is around them
            text = json.dumps("x" * (LARGEST_FACT - 2))
            client.append(
                envelope_for(f"m{number}", from_zone="a", to_zone="b"),
                Fact(subject="batch:B1", predicate="done", object_json=text),
            )
        with grpc.insecure_channel(url.removeprefix("http://")) as channel:
            fetch = channel.unary_unary(
                f"/{SERVICE}/FetchFacts",
                lambda message: message.to_binary(),
                pb.FetchFactsResponse.from_binary,
            )
            page = fetch(pb.FetchFactsRequest(consumer_name="c", limit=1000), timeout=30)
            assert [each.offset for each in page.facts] == [1, 2, 3]
            with pytest.raises(grpc.RpcError, match="larger than max"):
                fetch(
                    pb.FetchFactsRequest(consumer_name="c", limit=1000, max_bytes=PAGE_BYTES + 100_000),
                    timeout=30,
                )
        assert len(client.fetch("c", 1000).facts) == 3
        assert len(client.fetch("c", 1000, max_bytes=10**9).facts) == 9
        assert len(client.fetch("c", 1000, max_bytes=1).facts) == 1, "one is never too large"
        with pytest.raises(InvalidArgument, match="max_bytes"):
            client.fetch("c", 1000, max_bytes=-1)


@pytest.mark.req("BC-37")
def test_many_small_facts_fit_as_well_with_all_that_is_around_them(tmp_path: Path) -> None:
    with boundary_server(tmp_path) as url, BoundaryClient(url) as client:
        for number in range(60):
            client.append(envelope_for(f"m{number}", from_zone="a", to_zone="b"), FACT)
        for most in (500, 1000, 2000):
            page = client.fetch("c", 1000, max_bytes=most)
            raw = [(f.offset, _record(f.envelope.message_id), f.appended_at_unix_ms) for f in page.facts]
            assert most / 2 < len(page_bytes(raw, None)) <= most


def _record(message_id: str) -> bytes:
    from onceward.boundary.wire import record

    return record(envelope_for(message_id, from_zone="a", to_zone="b"), FACT)


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-38")
def test_a_name_too_many_is_refused_until_one_is_removed(client: BoundaryClient) -> None:
    client.append(envelope_for("m1", from_zone="a", to_zone="b"), FACT)
    client.fetch("one")
    client.fetch("two")
    client.confirm("two", 1)
    with pytest.raises(QuotaExceeded, match=r"there are 2 consumers.*consumers remove NAME") as raised:
        client.fetch("three")
    assert (raised.value.code, raised.value.reason, raised.value.retryable) == (
        "resource_exhausted",
        "quota_exceeded",
        True,
    )
    assert len(client.fetch("one").facts) == 1, "known names go on"
    assert client.remove_consumer("two") == 1
    assert len(client.fetch("three").facts) == 1
    for name in ("two", "never seen"):
        with pytest.raises(NotFound, match="there is no consumer"):
            client.remove_consumer(name)
    with pytest.raises(NotFound):
        client.confirm("two", 1)
    with pytest.raises(InvalidArgument, match="consumer_name"):
        client.remove_consumer("")


@pytest.mark.req("BC-38")
def test_a_removed_name_is_no_longer_in_the_metrics(tmp_path: Path) -> None:
    with boundary_server(tmp_path) as url, BoundaryClient(url) as client:

        def metrics() -> str:
            with urllib.request.urlopen(f"{url}/metrics") as answer:
                return str(answer.read(), "utf-8")

        client.fetch("gone")
        assert 'bsfg_consumer_backlog{consumer="gone"} 0.0' in metrics()
        client.remove_consumer("gone")
        assert "gone" not in metrics()


# ── labels ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-39")
def test_a_fact_has_so_many_labels(client: BoundaryClient) -> None:
    def envelope(count: int) -> object:
        labels = {f"l{number}": "x" for number in range(count)}
        return envelope_for(f"m{count}", from_zone="a", to_zone="b", labels=labels)

    assert client.append(envelope(3), FACT).offset == 1  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"envelope\.labels has 4 labels; the limit is 3"):
        client.append(envelope(4), FACT)  # type: ignore[arg-type]


@pytest.mark.req("BC-39")
@pytest.mark.parametrize("name", ["l", "ü"])
def test_labels_count_toward_the_size_of_a_fact(name: str) -> None:
    fact = Fact(subject="a:b", predicate="done", object_json=json.dumps("x" * (LARGEST_FACT - 102)))
    room = 100 - len(name.encode())
    fits = envelope_for("m1", from_zone="a", to_zone="b", labels={name: "y" * room})
    check_append(fits, fact)
    with pytest.raises(InvalidArgument, match=r"envelope\.labels have 101 bytes, and fact\.object_json has"):
        check_append(
            envelope_for("m1", from_zone="a", to_zone="b", labels={name: "y" * (room + 1)}),
            fact,
        )


@pytest.mark.req("BC-64")
@pytest.mark.parametrize("bad", ["\0", "\n", "\x1b", "\u202e"])
def test_subjects_and_labels_have_only_characters_that_can_be_printed(bad: str) -> None:
    def check(subject: str, labels: dict[str, str]) -> None:
        envelope = envelope_for("m1", from_zone="a", to_zone="b", labels=labels)
        check_append(envelope, Fact(subject=subject, predicate="done", object_json="{}"))

    check("tank:ü", {"ü l": "an ordinary value", "empty": ""})
    for labels in ({f"a{bad}": "b"}, {"a": f"{bad}b"}):
        with pytest.raises(InvalidArgument, match=r"envelope\.labels has a name or value with unprintable"):
            check("a:b", labels)
    with pytest.raises(InvalidArgument, match=r"fact\.subject"):
        check(f"a:b{bad}c", {})


def test_by_default_a_fact_has_up_to_64_labels(tmp_path: Path) -> None:
    with boundary_server(tmp_path) as url, BoundaryClient(url) as client:
        many = {f"l{number}": "x" * 1000 for number in range(64)}
        client.append(envelope_for("m1", from_zone="a", to_zone="b", labels=many), FACT)
        with pytest.raises(InvalidArgument, match="the limit is 64"):
            client.append(envelope_for("m2", from_zone="a", to_zone="b", labels={**many, "x": "x"}), FACT)


# ── objects ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-40")
def test_objects_too_many_or_too_large_together_are_refused(client: BoundaryClient, tmp_path: Path) -> None:
    blob = b"x" * 1_500_000
    client.put("b", "one", blob)
    with pytest.raises(QuotaExceeded, match="may take 2,000,000; raise `object_bytes`") as raised:
        client.put("b", "two", b"y" * 1_500_000)
    assert raised.value.code == "resource_exhausted"
    assert list((tmp_path / "objects" / "incoming").iterdir()) == [], "nothing is left of it"
    client.put("b", "one", blob)
    client.put("b", "two", b"small")
    with pytest.raises(QuotaExceeded, match="there are 2 objects here"):
        client.put("b", "three", b"small")
    with pytest.raises(NotFound):
        client.get("b", "three")

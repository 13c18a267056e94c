"""Many facts in one call: each has its own outcome, and callers at once share a call without a say in each other's."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from connectrpc.code import Code
from connectrpc.errors import ConnectError

from onceward.boundary import Appended, BoundaryClient, BoundaryError, Envelope, Fact, envelope_for, fact_of
from onceward.boundary.boundary import Boundary, BoundarySettings
from onceward.boundary.client import loads
from onceward.boundary.client.loads import LOAD_BYTES
from onceward.boundary.errors import (
    Aborted,
    ArtifactMissing,
    Backpressure,
    ConflictingDuplicate,
    InvalidArgument,
    Unavailable,
)
from onceward.boundary.model import LARGEST_FACT, MOST_APPENDED
from onceward.boundary.v1 import boundary_pb as pb
from onceward.boundary.v1.boundary_connect import BoundaryServiceClientSync
from onceward.boundary.wire import as_pb_envelope, as_pb_fact
from tests.support.boundary.callers import Callers, HeldApplication, OlderApplication, callers_of
from tests.support.boundary.server import boundary_server
from tests.support.wait import until

MODES = ["threads", "asyncio"]
Message = tuple[Envelope, Fact]


def message(name: str, value: Any = 1, subject: str = "batch:B1") -> Message:
    return envelope_for(name, from_zone="a", to_zone="b"), fact_of(subject, "done", value)


def messages(*names: str) -> list[Message]:
    return [message(name) for name in names]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[BoundaryClient]:
    settings = BoundarySettings(require_artifacts=True)
    with boundary_server(tmp_path / "data", settings) as url, BoundaryClient(url) as made:
        yield made


def ids_in(client: BoundaryClient, name: str = "reader") -> list[str]:
    return [each.message_id for each in client.fetch(name, 1000).facts]


class Server:
    """A boundary whose application the test can hold up."""

    def __init__(self, directory: Path, kind: type[HeldApplication] = HeldApplication) -> None:
        self._kind = kind
        self.application: HeldApplication | None = None
        self.serving = boundary_server(directory, application=self._build)

    def _build(self, boundary: Boundary) -> HeldApplication:
        self.application = self._kind(boundary)
        return self.application

    @property
    def calls(self) -> list[str]:
        assert self.application is not None
        return self.application.calls


@pytest.fixture(params=MODES)
def held(request: Any, tmp_path: Path) -> Iterator[tuple[HeldApplication, Callers]]:
    server = Server(tmp_path / "data")
    with server.serving as url, callers_of(url, request.param) as callers:
        assert server.application is not None
        try:
            yield server.application, callers
        finally:
            server.application.release.set()


# ── one outcome each ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-53")
def test_each_fact_has_the_answer_that_it_would_have_alone(client: BoundaryClient) -> None:
    client.append(*message("known"))
    missing = message("missing", {"bucket": "files", "key": "none"})
    given = [
        message("one"),
        message("known"),
        message("known", "other"),
        (envelope_for("", from_zone="a", to_zone="b"), fact_of("batch:B1", "done", 1)),
        missing,
        message("large", "x" * LARGEST_FACT),
        message("two"),
        message("two"),
        message("two", "other"),
        message("bad", subject="nothing"),
        message("three"),
    ]
    outcomes = client.append_all(given)
    assert outcomes[0] == Appended(2)
    assert outcomes[1] == Appended(1, duplicate=True)
    assert outcomes[6:8] == [Appended(3), Appended(3, duplicate=True)]
    assert outcomes[10] == Appended(4)
    kinds = [ConflictingDuplicate, InvalidArgument, ArtifactMissing, InvalidArgument, ConflictingDuplicate]
    refused = [each for each in outcomes if isinstance(each, BoundaryError)]
    assert [type(each) for each in refused] == [*kinds, InvalidArgument]
    fields = ["", "envelope.message_id", "fact.object_json", "fact.object_json", "", "fact.subject"]
    assert [each.field for each in refused] == fields
    assert [each.original_offset for each in refused if isinstance(each, ConflictingDuplicate)] == [1, 3]
    assert ids_in(client) == ["known", "one", "two", "three"]
    for each, outcome in zip(given, outcomes, strict=True):
        if isinstance(outcome, BoundaryError):
            with pytest.raises(type(outcome)) as alone:
                client.append(*each)
            assert str(alone.value) == str(outcome)
        else:
            assert client.append(*each).offset == outcome.offset


@pytest.mark.req("BC-53")
def test_in_order_nothing_follows_one_that_is_refused(client: BoundaryClient) -> None:
    client.append(*message("known"))
    missing = message("missing", {"bucket": "files", "key": "none"})
    given = [message("known", "other"), message("one"), missing, *messages("two", "known", "three")]
    outcomes = client.append_all(given, in_order=True)
    kinds = [ConflictingDuplicate, Appended, ArtifactMissing, Aborted, Aborted, Aborted]
    assert [type(each) for each in outcomes] == kinds
    assert all(each.retryable for each in outcomes if isinstance(each, Aborted))
    assert ids_in(client) == ["known", "one"]
    large = [message(f"m{number}", "x" * 1000) for number in range(100)]
    large[70:70] = [missing]
    outcomes = client.append_all(large, in_order=True)
    assert [type(each) for each in outcomes] == [*[Appended] * 70, ArtifactMissing, *[Aborted] * 30]


@pytest.mark.req("BC-53")
def test_facts_that_lack_a_part_and_requests_of_odd_sizes_get_a_clear_answer(tmp_path: Path) -> None:
    with boundary_server(tmp_path / "data") as url:
        rpc = BoundaryServiceClientSync(url)
        envelope, fact = message("m1")
        whole = pb.AppendFactRequest(envelope=as_pb_envelope(envelope), fact=as_pb_fact(fact))
        parts = [pb.AppendFactRequest(), pb.AppendFactRequest(envelope=whole.envelope), whole]
        answer = rpc.append_facts(pb.AppendFactsRequest(facts=parts))
        found = [
            each.refusal.detail.field if each.refusal and each.refusal.detail else each.offset
            for each in answer.outcomes
        ]
        assert found == ["envelope", "fact", 1]
        assert rpc.append_facts(pb.AppendFactsRequest()).outcomes == []
        for count in (MOST_APPENDED + 1, 10_001):
            with pytest.raises(ConnectError, match=f"facts has {count} facts; the limit is 1000") as raised:
                rpc.append_facts(pb.AppendFactsRequest(facts=[whole] * count))
            assert raised.value.code is Code.INVALID_ARGUMENT
        answer = rpc.append_facts(pb.AppendFactsRequest(facts=[whole] * MOST_APPENDED))
        assert {(each.offset, each.duplicate) for each in answer.outcomes} == {(1, True)}


@pytest.mark.req("BC-53")
def test_under_backpressure_what_is_there_has_its_offset_and_one_too_large_harms_no_other(
    tmp_path: Path,
) -> None:
    settings = BoundarySettings(capacity_bytes=1_000_000, backpressure_at=0.5)
    with boundary_server(tmp_path / "data", settings) as url, BoundaryClient(url) as client:
        huge = message("huge", "x" * 900_000)
        outcomes = client.append_all([message("one"), huge, message("two")])
        assert [type(each) for each in outcomes] == [Appended, InvalidArgument, Appended]
        outcomes = client.append_all([message(f"m{number}", "x" * 10_000) for number in range(100)])
        written = [each for each in outcomes if isinstance(each, Appended)]
        assert [each.offset for each in written] == list(range(3, len(written) + 3))
        assert {type(each) for each in outcomes[len(written) :]} == {Backpressure}
        found = client.append_all([message("one"), message("new", "y" * 10_000), message("two")])
        assert found[0] == Appended(1, duplicate=True)
        assert isinstance(found[1], Backpressure)
        assert found[2] == Appended(2, duplicate=True)


@pytest.mark.req("BC-53")
@pytest.mark.parametrize("mode", MODES)
def test_a_long_list_keeps_its_order_and_is_sent_in_few_calls(tmp_path: Path, mode: str) -> None:
    server = Server(tmp_path / "data")
    with server.serving as url, callers_of(url, mode) as callers:
        names = [f"m{number}" for number in range(2500)]
        assert callers.call("append_all", messages(*names)).result() == [Appended(n) for n in range(1, 2501)]
        assert server.calls.count("AppendFacts") == len(server.calls) < 2500 * 100 // LOAD_BYTES + 10
        assert callers.call("append_all", []).result() == []


# ── callers at once ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-54")
def test_what_arrives_during_a_call_goes_together_and_each_has_its_own_answer(held: Any) -> None:
    server, callers = held
    others = [*messages("b", "c"), message("c", "other"), message("bad", subject="x"), *messages("a", "d")]
    futures = callers.append_behind(server, message("a"), others)
    server.release.set()
    outcomes = [future.exception() or future.result() for future in futures]
    assert outcomes[:3] == [Appended(1), Appended(2), Appended(3)]
    assert [type(each) for each in outcomes[3:5]] == [ConflictingDuplicate, InvalidArgument]
    assert outcomes[5:] == [Appended(1, duplicate=True), Appended(4)]
    assert server.calls == ["AppendFact", "AppendFacts"]
    assert callers.append(*message("alone")).result() == Appended(5)
    assert server.calls[2:] == ["AppendFact"], "one alone waits for nothing"


@pytest.mark.req("BC-54")
def test_a_large_fact_goes_alone_and_no_message_is_larger_than_a_load(held: Any) -> None:
    server, callers = held
    large = [message(f"large-{number}", "x" * LOAD_BYTES) for number in range(2)]
    given = [message("b"), large[0], message("c"), large[1], message("d"), message("e")]
    futures = callers.append_behind(server, message("a"), given)
    server.release.set()
    assert [future.result().offset for future in futures] == list(range(1, 8))
    assert server.calls == [*["AppendFact"] * 5, "AppendFacts"]


@pytest.mark.req("BC-54")
def test_one_that_cannot_be_encoded_fails_alone(held: Any) -> None:
    server, callers = held
    futures = callers.append_behind(server, message("a"), messages("b", "c"))
    odd = callers.append(envelope_for("\ud800", from_zone="a", to_zone="b"), fact_of("a:b", "c", 1))
    assert isinstance(odd.exception(), InvalidArgument)
    server.release.set()
    assert [future.result().offset for future in futures] == [1, 2, 3]


@pytest.mark.req("BC-54")
def test_callers_who_go_away_take_nothing_from_the_others(tmp_path: Path) -> None:
    server = Server(tmp_path / "data")
    with server.serving as url, callers_of(url, "asyncio") as callers:
        assert server.application is not None
        names = [f"m{number}" for number in range(20)]
        futures = callers.append_behind(server.application, message("first"), messages(*names))
        for gone in (futures[0], *futures[2::2]):
            gone.cancel()
        until(lambda: callers.waiting == 10 or len(server.calls) > 1)
        server.application.release.set()
        kept = [future.result().offset for future in futures[1::2]]
        assert kept == sorted(kept)
        log = callers.call("fetch", "reader", 100).result().facts
        assert {f"m{number}" for number in range(0, 20, 2)} <= {each.message_id for each in log}
        assert callers.append(*message("next")).result().offset > kept[-1], "the line goes on"


@pytest.mark.req("BC-54")
@pytest.mark.parametrize("leads", [True, False])
def test_ctrl_c_in_the_thread_that_calls_for_others_takes_nothing_from_them(
    tmp_path: Path, leads: bool
) -> None:
    """In the main thread, a signal handler that raises ends the wait at once."""
    server = Server(tmp_path / "data")
    with server.serving as url, callers_of(url, "threads") as callers:
        assert server.application is not None
        futures: list[Any] = []
        if leads:
            server.application.release.clear()
        else:
            futures = callers.append_behind(server.application, message("first"), messages("a"))

        def interrupt() -> None:
            """When the main thread waits, and three others behind it."""
            if leads:
                until(lambda: len(server.calls) == 1)
            until(lambda: callers.waiting == (0 if leads else 2))
            futures.extend(callers.append(*each) for each in messages("b", "c", "d"))
            until(lambda: callers.waiting == (3 if leads else 5))
            signal.raise_signal(signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            callers.client.append(*message("main"))
        thread.join()
        server.application.release.set()
        assert len({future.result().offset for future in futures}) == len(futures)
        assert callers.append(*message("next")).result().offset > 1, "the line goes on"


@pytest.mark.req("BC-54")
@pytest.mark.parametrize("mode", MODES)
def test_each_caller_waits_no_longer_than_its_own_time_limit(tmp_path: Path, mode: str) -> None:
    server = Server(tmp_path / "data")
    with server.serving as url, callers_of(url, mode, timeout=1.5) as callers:
        assert server.application is not None
        futures = callers.append_behind(server.application, message("a"), messages("b", "c"))
        for future in futures:
            with pytest.raises(Unavailable, match=r"no answer in time|timed out"):
                future.result()
        server.application.release.set()
        until(lambda: callers.append(*message("next")).exception() is None)


@pytest.mark.req("BC-54")
def test_a_call_that_hangs_does_not_hold_up_the_others(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, callers = held
    stuck, waiting = callers.append_behind(server, message("stuck"), messages("waiting"))
    server.hold_only = len(server.calls)  # the connection of that call is dead
    monkeypatch.setattr(loads, "STUCK_AFTER", 0.0)
    assert callers.append(*message("next")).result().offset == 1
    assert waiting.result().offset == 2
    assert not stuck.done()
    server.release.set()
    assert stuck.result().offset == 3


@pytest.mark.req("BC-54")
@pytest.mark.parametrize("mode", MODES)
def test_a_boundary_that_is_gone_fails_all_that_wait_each_with_its_own_error(mode: str) -> None:
    with callers_of("http://127.0.0.1:1", mode) as callers:
        futures = [callers.append(*message(f"m{number}")) for number in range(50)]
        errors = [future.exception() for future in futures]
        assert {type(each) for each in errors} == {Unavailable}
        assert len({id(each) for each in errors}) == 50


@pytest.mark.req("BC-55")
@pytest.mark.parametrize("mode", MODES)
def test_an_older_boundary_is_asked_once_and_then_gets_one_by_one(tmp_path: Path, mode: str) -> None:
    server = Server(tmp_path / "data", OlderApplication)
    with server.serving as url, callers_of(url, mode) as callers:
        assert server.application is not None
        given = [*messages("b", "c"), message("c", "other"), *messages("d")]
        futures = callers.append_behind(server.application, message("a"), given)
        server.application.release.set()
        outcomes = [future.exception() or future.result() for future in futures]
        assert sum(isinstance(each, Appended) for each in outcomes) == 4
        assert sum(isinstance(each, ConflictingDuplicate) for each in outcomes) == 1
        assert server.calls.count("AppendMany") == 1
        listed = callers.call("append_all", [*messages("e", "f"), message("f", 2), *messages("g")]).result()
        kinds = [Appended, Appended, ConflictingDuplicate, Appended]
        assert [type(each) for each in listed] == kinds
        more = [callers.append(*message(f"m{number}")) for number in range(20)]
        assert all(future.result() for future in more)
        assert server.calls.count("AppendMany") == 1, "it remembers"


@pytest.mark.req("BC-55")
def test_a_list_finds_out_about_an_older_boundary_itself(tmp_path: Path) -> None:
    server = Server(tmp_path / "data", OlderApplication)
    with server.serving as url, BoundaryClient(url) as client:
        bad = message("bad", subject="x")
        outcomes = client.append_all([*messages("a", "b"), bad, *messages("c")], in_order=True)
        assert [type(each) for each in outcomes] == [Appended, Appended, InvalidArgument, Aborted]
        assert server.calls == ["AppendMany", *["AppendFact"] * 3]


@pytest.mark.req("BC-54")
@pytest.mark.parametrize("mode", MODES)
def test_hundreds_at_once_arrive_once_each_and_in_each_callers_order(tmp_path: Path, mode: str) -> None:
    with boundary_server(tmp_path / "data") as url, callers_of(url, mode) as callers:
        for number in range(10):
            futures = [callers.append(*message(f"{caller}-{number}")) for caller in range(60)]
            assert len({future.result().offset for future in futures}) == 60
        with suppress(StopIteration), BoundaryClient(url) as client:
            log = ids_in(client)
        assert len(log) == len(set(log)) == 600
        for caller in range(60):
            mine = [each for each in log if each.startswith(f"{caller}-")]
            assert mine == [f"{caller}-{number}" for number in range(10)]

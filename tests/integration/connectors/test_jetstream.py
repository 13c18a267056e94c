"""Specific to JetStream: waits, fences, crashes in the middle of a burial, servers that go away, and the engine."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import nats
import pytest

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward._nats.connection import CALL_WAIT, NatsUnavailable
from onceward._nats.wire import nats_loop
from onceward.connectors import BurialReason, PayloadError
from onceward.connectors.jetstream import AsyncJetStreamConnector, JetStreamConnector
from onceward.connectors.jetstream.letters import JetStreamLetters
from onceward.connectors.lease_rules import JITTER
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.testing.connectors.driver import ConnectorDriver
from onceward.testing.servers import nats_server
from onceward.transaction import Settlement, Verdict
from tests.support.jetstream_time import JetStreamTime, observed
from tests.support.nats_config import configured_nats
from tests.support.proxy import WireFault, proxy_to
from tests.support.wait import until
from tests.support.world import consuming

BUSINESS = TransactionException("card expired", ExceptionCategory.BUSINESS)


@pytest.fixture(scope="module")
def nats_url() -> Iterator[str]:
    with nats_server() as server:
        yield server.url


@pytest.fixture
def stream() -> str:
    return f"test-{uuid4().hex}"


@pytest.fixture
def timed(nats_url: str, stream: str) -> Iterator[JetStreamTime]:
    with observed(nats_url, stream) as made:
        yield made


@pytest.fixture(params=[JetStreamConnector, AsyncJetStreamConnector], ids=["threads", "asyncio"])
def driver(request: pytest.FixtureRequest, nats_url: str, stream: str) -> Iterator[ConnectorDriver]:
    with ConnectorDriver(request.param(nats_url, stream)) as made:
        yield made


def numbered(count: int) -> list[Transaction]:
    return [Transaction(id=f"t{number}", payload=number) for number in range(count)]


def on_nats(url: str, work: Callable[[Any], Any]) -> Any:
    """Run this with a client of its own."""

    async def run() -> Any:
        client = await nats.connect(url)
        try:
            return await work(client.jetstream())
        finally:
            await client.close()

    return asyncio.run_coroutine_threadsafe(run(), nats_loop()).result(30)


def done(*transactions: Transaction) -> list[Settlement]:
    return [Settlement(each, Verdict.DONE) for each in transactions]


# ── waiting ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("NJ-02")
def test_what_a_wait_has_taken_is_given_back_if_nobody_fetches_it(stream: str, nats_url: str) -> None:
    with JetStreamConnector(nats_url, stream, lease=600.0) as source:
        assert source.fetch_transactions(5) == []  # creates the stream
        source.dispatch_transactions(numbered(7))
        assert source.await_transactions(30.0)
    with JetStreamConnector(nats_url, stream, lease=600.0) as other:
        found: list[Transaction] = []
        while len(found) < 7:
            other.await_transactions(30.0)
            found += other.fetch_transactions(10)
        assert sorted(each.id for each in found) == [f"t{number}" for number in range(7)]


@pytest.mark.req("NJ-02")
def test_a_smaller_fetch_leaves_the_rest_of_a_wait_for_the_next(stream: str, nats_url: str) -> None:
    with JetStreamConnector(nats_url, stream) as source:
        assert source.fetch_transactions(5) == []
        source.dispatch_transactions(numbered(5))
        assert source.await_transactions(30.0)
        assert [len(source.fetch_transactions(3)) for _ in range(2)] == [3, 2]


@pytest.mark.req("NJ-02")
def test_what_a_wait_has_taken_is_not_fetched_after_its_lease(stream: str, nats_url: str) -> None:
    # A consumer that was paused during the wait does not fetch what came, and another one gets it.
    with (
        JetStreamConnector(nats_url, stream, lease=4.0) as source,
        JetStreamConnector(nats_url, stream, lease=4.0) as other,
    ):
        assert source.fetch_transactions(5) == []
        source.dispatch_transactions(numbered(2))
        assert source.await_transactions(30.0)
        time.sleep(4.5)
        found: list[Transaction] = []
        while len(found) < 2:
            other.await_transactions(30.0)
            found += other.fetch_transactions(5)
        assert source.fetch_transactions(5) == []
        other.settle_transactions(done(*found))


@pytest.mark.req("NJ-02")
@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_a_stop_ends_the_wait_and_takes_nothing_along(kind: str, nats_url: str, stream: str) -> None:
    began = time.monotonic()
    if kind == "threads":
        source = JetStreamConnector(nats_url, stream, lease=600.0)
        task: Any = type("Idle", (ConsumerTask,), {"process_transaction": lambda *_: None})(
            {"source": source}
        )
        threading.Timer(0.5, task.stop).start()
        task.consume_transactions(consuming(streaming=True))
        source.close()
    else:

        async def main() -> None:
            class Idle(AsyncConsumerTask):
                async def process_transaction(self, transaction: Transaction) -> None:
                    pass

            async with AsyncJetStreamConnector(nats_url, stream, lease=600.0) as source:
                task = Idle({"source": source})
                asyncio.get_running_loop().call_later(0.5, task.stop)
                await task.consume_transactions(consuming(streaming=True))

        asyncio.run(main())
    assert time.monotonic() - began < 30
    with JetStreamConnector(nats_url, stream, lease=600.0) as connector:
        connector.dispatch_transactions(numbered(1))  # the request that was stopped must not get it
        assert [each.id for each in connector.fetch_transactions(1)] == ["t0"]


@pytest.mark.req("NJ-02")
def test_a_canceled_fetch_gives_back_what_it_took(nats_url: str, stream: str) -> None:
    async def main() -> None:
        async with AsyncJetStreamConnector(nats_url, stream) as connector:
            await connector.dispatch_transactions_async(numbered(3))
            [first] = await connector.fetch_transactions_async(1)
            fetching = asyncio.ensure_future(connector.fetch_transactions_async(2))
            await asyncio.sleep(0)  # it has begun
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            found: list[str] = []
            while len(found) < 2:
                found += [each.id for each in await connector.fetch_transactions_async(2)]
            assert sorted(found) == ["t1", "t2"]
            assert first.id == "t0"

    asyncio.run(main())


# ── fences and burials ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("NJ-03")
def test_a_late_outcome_of_another_process_changes_nothing(
    nats_url: str, stream: str, timed: JetStreamTime, caplog: pytest.LogCaptureFixture
) -> None:
    """JetStream itself would accept the acknowledgment."""
    moment = [0.0]
    with (
        JetStreamConnector(nats_url, stream, clock=lambda: moment[0]) as slow,
        JetStreamConnector(nats_url, stream) as other,
    ):
        slow.dispatch_transactions(numbered(1))
        late = slow.fetch_transactions(1)
        moment[0] = 61.0
        timed.advance(61.0)
        [again] = other.fetch_transactions(1)
        with caplog.at_level(logging.WARNING):
            slow.settle_transactions(done(*late))
        assert "lease expired before outcome `done`" in caplog.text
        timed.advance(61.0)
        assert [each.id for each in other.fetch_transactions(1)] == ["t0"]
        assert again.id == "t0"


@pytest.mark.req("NJ-03")
@pytest.mark.parametrize("is_tidy", [False, True], ids=["an older message runs", "its record was removed"])
def test_a_late_failure_makes_no_dead_letter_of_a_message_that_another_has_done(
    nats_url: str, stream: str, timed: JetStreamTime, is_tidy: bool
) -> None:
    moment = [0.0]
    with (
        JetStreamConnector(nats_url, stream, clock=lambda: moment[0]) as slow,
        JetStreamConnector(nats_url, stream) as other,
    ):
        slow.dispatch_transactions(numbered(2))
        late = slow.fetch_transactions(2)
        moment[0] = 61.0
        timed.advance(61.0)
        again = other.fetch_transactions(2)
        other.settle_transactions(done(*again) if is_tidy else done(again[1]))
        if is_tidy:
            with JetStreamConnector(nats_url, stream) as third:
                assert third.fetch_transactions(1) == []
                until(third._queue._home.tidying.done)  # type: ignore[union-attr]
        slow.settle_transactions([Settlement(late[1], Verdict.FAILED, BUSINESS)])
        assert other.counts() == {"ready": 0, "leased": 0 if is_tidy else 1, "dead": 0}


@pytest.mark.req("NJ-03")
def test_records_of_messages_that_ended_are_removed_while_it_runs(
    nats_url: str, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceward.connectors.jetstream.home.TIDY_AFTER", 2)
    with JetStreamConnector(nats_url, stream) as source:
        source.dispatch_transactions(numbered(3))
        source.settle_transactions(
            [Settlement(each, Verdict.RETURNED) for each in source.fetch_transactions(3)]
        )
        source.settle_transactions(done(*source.fetch_transactions(3)))

        def records() -> int:
            found: int = on_nats(
                nats_url, lambda js: js.stream_info(f"{stream}-onceward-onceward")
            ).state.messages
            return found

        until(lambda: records() == 0)


@pytest.mark.req("NJ-03")
def test_a_late_success_counts_if_nobody_else_had_the_message_even_if_its_acknowledgment_is_lost(
    nats_url: str, stream: str, timed: JetStreamTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = [0.0]
    with JetStreamConnector(nats_url, stream, clock=lambda: moment[0]) as slow:
        slow.dispatch_transactions(numbered(2))
        late = slow.fetch_transactions(1)
        moment[0] = 58.0

        async def lose(messages: Any) -> None:
            raise NatsUnavailable("lost")

        monkeypatch.setattr(slow._queue._home.link, "tell", lose)  # type: ignore[union-attr]
        with pytest.raises(NatsUnavailable):
            slow.settle_transactions(done(*late))
        monkeypatch.undo()
        timed.advance(61.0)
        moment[0] = 61.0
        assert [each.id for each in slow.fetch_transactions(2)] == ["t1"]
        assert slow.counts() == {"ready": 0, "leased": 1, "dead": 0}


@pytest.mark.req("NJ-04")
@pytest.mark.parametrize("moved", [False, True], ids=["kept", "moved"])
def test_a_burial_that_a_crash_interrupted_is_finished_and_makes_one_letter(
    nats_url: str, stream: str, timed: JetStreamTime, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    async def crash(*_: Any) -> None:
        raise NatsUnavailable("crash")

    with JetStreamConnector(nats_url, stream) as connector:
        connector.dispatch_transactions(numbered(1))
        fetched = connector.fetch_transactions(1)
        if moved:  # after the letter, before the end of the message
            monkeypatch.setattr(connector._queue._home.link, "tell", crash)  # type: ignore[union-attr]
        else:
            monkeypatch.setattr(JetStreamLetters, "keep", crash)
        with pytest.raises(NatsUnavailable):
            connector.settle_transactions([Settlement(fetched[0], Verdict.FAILED, BUSINESS)])
        monkeypatch.undo()
        letters = connector.dead_letters()
        assert len(letters) == moved
        connector.forget_dead([each.key for each in letters])
    timed.advance(61.0)
    with JetStreamConnector(nats_url, stream) as connector:
        assert connector.fetch_transactions(1) == []
        letters = connector.dead_letters()
        assert [(each.transaction_id, each.reason, each.deliveries) for each in letters] == (
            [] if moved else [("t0", BurialReason.FAILED, 1)]
        )
        assert connector.counts()["leased"] == 0


@pytest.mark.req("NJ-04")
def test_a_message_as_large_as_nats_takes_can_be_buried(tmp_path: Path, stream: str) -> None:
    with (
        configured_nats(tmp_path, "max_payload: 65536") as server,
        JetStreamConnector(server.url, stream) as connector,
    ):
        connector.dispatch_transactions([Transaction("small")])
        on_nats(server.url, lambda js: js.publish(stream, bytes(65536)))
        fetched = connector.fetch_transactions(2)
        assert [each.id for each in fetched] == ["small"]
        [letter] = connector.dead_letters()
        assert (letter.reason, letter.body) == (BurialReason.UNDECODABLE, bytes(65536))


@pytest.mark.req("NJ-04")
def test_long_errors_are_shortened_and_the_rest_of_the_history_stays(
    nats_url: str, stream: str, timed: JetStreamTime
) -> None:
    with JetStreamConnector(nats_url, stream, max_deliveries=2) as connector:
        connector.dispatch_transactions(numbered(1))
        for _ in range(2):
            [fetched] = connector.fetch_transactions(1)
            error = TransactionException("x" * 1_000_000, ExceptionCategory.SYSTEM)
            connector.settle_transactions([Settlement(fetched, Verdict.FAILED, error)])
            timed.advance(61.0)
        [letter] = connector.dead_letters()
        assert [each.attempt for each in letter.history] == [1, 2]
        assert all(4_000 < len(each.error) < 6_000 for each in letter.history)


# ── crashes and outages ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("NJ-01")
def test_messages_of_a_killed_process_come_back_by_themselves_and_count(nats_url: str, stream: str) -> None:
    script = f"""
        from onceward.connectors.jetstream import JetStreamConnector
        connector = JetStreamConnector({nats_url!r}, {stream!r}, lease=0.5)
        print(len(connector.fetch_transactions(10)), flush=True)
        import time; time.sleep(60)
    """
    with JetStreamConnector(nats_url, stream, lease=0.5) as connector:
        connector.dispatch_transactions(numbered(5))
        victim = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"5\n"
        victim.kill()
        victim.communicate()
        recovered: list[Transaction] = []

        def is_all_there() -> bool:
            taken = connector.fetch_transactions(10)
            recovered.extend(taken)
            deliveries = [connector._queue._deliveries.of(each) for each in taken]
            assert all((each.deliveries, each.lost) >= (2, 1) for each in deliveries)
            connector.settle_transactions(done(*taken))
            return len({each.id for each in recovered}) == 5

        until(is_all_there)


@pytest.mark.req("NJ-06")
def test_a_server_that_is_away_is_reported_and_used_again_when_it_is_back(stream: str) -> None:
    with nats_server(durable=True) as server, JetStreamConnector(server.url, stream) as connector:
        connector.dispatch_transactions(numbered(3))
        first = connector.fetch_transactions(1)
        server.kill()
        calls: list[Callable[[], object]] = [
            lambda: connector.fetch_transactions(1),
            lambda: connector.dispatch_transactions(numbered(1)),
            lambda: connector.settle_transactions(done(*first)),
        ]
        for call in calls:
            with pytest.raises(NatsUnavailable, match="NATS at"):
                call()
        server.start()
        until(lambda: _works(lambda: connector.settle_transactions(done(*first))))
        seen: set[str] = set()

        def is_complete() -> bool:
            seen.update(each.id for each in connector.fetch_transactions(5))
            return seen >= {"t1", "t2"}

        until(is_complete)


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except NatsUnavailable:
        return False
    return True


@pytest.mark.req("NJ-06")
def test_a_consumer_that_was_deleted_is_created_again_and_that_is_said(
    nats_url: str, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    with JetStreamConnector(nats_url, stream) as connector:
        connector.dispatch_transactions(numbered(2))
        connector.settle_transactions(done(*connector.fetch_transactions(2)))
        on_nats(nats_url, lambda js: js.delete_consumer(stream, "onceward"))
        with caplog.at_level(logging.WARNING):
            until(lambda: _works(lambda: connector.fetch_transactions(1)))
        assert "the consumer onceward of stream" in caplog.text
        assert "has disappeared" in caplog.text


@pytest.mark.req("NJ-06")
def test_a_stream_that_was_deleted_is_created_again_by_a_connector_that_only_sends(
    nats_url: str, stream: str
) -> None:
    with JetStreamConnector(nats_url, stream) as connector:
        connector.dispatch_transactions(numbered(1))
        on_nats(nats_url, lambda js: js.delete_stream(stream))
        until(lambda: _works(lambda: connector.dispatch_transactions(numbered(2))))
        assert connector.counts()["ready"] == 2


@pytest.mark.req("NJ-06")
def test_a_stream_of_records_that_was_deleted_is_created_again_and_that_is_said(
    nats_url: str, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    with JetStreamConnector(nats_url, stream, lease=1.0, redelivery_delay=0.1) as connector:
        connector.dispatch_transactions(numbered(1))
        fetched = list(connector.fetch_transactions(1))
        on_nats(nats_url, lambda js: js.delete_stream(f"{stream}-onceward-onceward"))

        def buries() -> bool:
            fetched.extend(connector.fetch_transactions(1))
            connector.settle_transactions(
                [Settlement(each, Verdict.FAILED, error=BUSINESS) for each in fetched]
            )
            return True

        with caplog.at_level(logging.WARNING):
            until(lambda: _works(buries))
        assert f"the stream {stream}-onceward-onceward has disappeared" in caplog.text
        assert [each.transaction.id for each in connector.dead_letters() if each.transaction] == ["t0"]


@pytest.mark.req("NJ-06")
def test_a_forked_process_gets_a_connection_of_its_own(nats_url: str, stream: str) -> None:
    with JetStreamConnector(nats_url, stream) as connector:
        connector.dispatch_transactions(numbered(2))
        fetched = connector.fetch_transactions(1)
        child = os.fork()
        if child == 0:
            try:
                connector.settle_transactions(done(*fetched))
                os._exit(len(connector.fetch_transactions(5)))
            except BaseException:
                os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert connector.counts() == {"ready": 0, "leased": 1, "dead": 0}


@pytest.mark.req("NJ-06")
@pytest.mark.parametrize("fault", list(WireFault), ids=str)
@pytest.mark.parametrize("on", [b"MSG.NEXT", b"+ACK", b"Nats-Batch-Commit"], ids=["pull", "ack", "send"])
def test_a_request_that_the_wire_spoils_loses_nothing(
    nats_url: str, stream: str, fault: WireFault, on: bytes
) -> None:
    server = urlsplit(nats_url)
    sent, seen = numbered(6), set()
    with proxy_to(str(server.hostname), server.port or 4222) as proxy:
        url = f"nats://127.0.0.1:{proxy.port}"
        with JetStreamConnector(url, stream, lease=1.0) as connector:
            assert connector.fetch_transactions(1) == []
            proxy.strike(fault, on=on)
            until(lambda: _works(lambda: connector.dispatch_transactions(sent)))

            def is_done() -> bool:
                taken = connector.fetch_transactions(2)
                until(lambda: _works(lambda: connector.settle_transactions(done(*taken))))
                seen.update(each.id for each in taken)
                counts = connector.counts()
                return counts["ready"] + counts["leased"] == 0

            until(lambda: _answers(is_done))
        assert proxy.struck == 1
    assert seen == {each.id for each in sent}


def _answers(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except NatsUnavailable:
        return False


@pytest.mark.req("NJ-01")
def test_leases_are_extended_from_a_thread_without_the_event_loop(
    nats_url: str, stream: str, timed: JetStreamTime
) -> None:
    async def main() -> None:
        async with AsyncJetStreamConnector(nats_url, stream) as connector:
            await connector.dispatch_transactions_async(numbered(1))
            fetched = await connector.fetch_transactions_async(1)
            timed.advance(50.0)
            helper = threading.Thread(target=connector.extend_from_thread, args=([*fetched, *numbered(1)],))
            helper.start()
            helper.join(30)  # the event loop is blocked meanwhile
            timed.advance(50.0)
            assert await connector.fetch_transactions_async(1) == []

    asyncio.run(main())


@pytest.mark.req("NJ-01")
def test_the_log_says_what_happens_next(nats_url: str, stream: str, caplog: pytest.LogCaptureFixture) -> None:
    with JetStreamConnector(nats_url, stream, max_deliveries=2) as connector:
        connector.dispatch_transactions(numbered(1))
        [fetched] = connector.fetch_transactions(1)
        with caplog.at_level(logging.INFO):
            connector.settle_transactions([Settlement(fetched, Verdict.FAILED)])
    [delay] = re.findall(
        r"transaction t0: delivery 1 of 2 failed; it will be redelivered in (\S+) s$",
        caplog.text,
        re.MULTILINE,
    )
    assert 1 - JITTER <= float(delay) <= 1


# ── dispatching ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("NJ-05")
def test_a_transaction_that_nats_does_not_take_is_refused_and_nothing_is_sent(
    driver: ConnectorDriver,
) -> None:
    with pytest.raises(PayloadError, match="raise max_payload"):
        driver.dispatch(Transaction("good"), Transaction("large", bytes(34_000_000)))
    with pytest.raises(PayloadError, match=r"1,001 transactions .* send fewer at a time"):
        driver.dispatch(*numbered(1001))
    assert driver.fetch(5) == []


@pytest.mark.req("NJ-05")
def test_the_largest_batch_arrives_whole_and_in_order(driver: ConnectorDriver) -> None:
    driver.dispatch(*numbered(1000))
    arrived: list[Any] = []

    def are_all_here() -> bool:
        arrived.extend(each.payload for each in driver.fetch(1000))  # a busy server may need several
        return len(arrived) >= 1000

    until(are_all_here)
    assert arrived == list(range(1000))


@pytest.mark.req("NJ-10")
def test_a_connector_closes_soon_though_the_server_is_silent(stream: str) -> None:
    with nats_server() as server:
        connector = JetStreamConnector(server.url, stream)
        connector.owner = "host-1"
        connector.dispatch_transactions([Transaction(id="a", payload=1)])
        [transaction] = connector.fetch_transactions(1)
        connector.settle_transactions([Settlement(transaction, Verdict.DONE)])
        assert server._process is not None
        os.kill(server._process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            connector.close()
            assert time.monotonic() - began < CALL_WAIT
        finally:
            os.kill(server._process.pid, signal.SIGCONT)

"""The relay: every committed message, at least once, in the order of its key, whatever fails."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from sqlalchemy import event, text

from onceward import minutes
from onceward.backoff import Backoff
from onceward.connectors import SqliteConnector
from onceward.connectors.codec import PayloadError
from onceward.connectors.urls import Address
from onceward.deadletters import DeadLetters, Filter, Rca
from onceward.deadletters.source import WithDeadLetters
from onceward.outbox.claims import OutboxRows
from onceward.outbox.relay import Relay, RelayRules
from onceward.transaction import Settlement, Transaction, Verdict
from tests.support.outbox import OutboxWorld, drain, outbox, turn
from tests.support.wait import until

__all__ = ["outbox"]


@pytest.mark.req("OB-01")
def test_only_what_is_committed_is_published(outbox: OutboxWorld) -> None:
    relay = outbox.relay()
    connection = outbox.engine.connect()
    ids = [outbox.app.outbox(connection).send("redis://x/ship", number) for number in range(3)]
    assert turn(relay) == 0
    connection.commit()
    drain(relay)
    assert [each.id for each in outbox.sink.arrived] == ids
    assert outbox.rows() == ["published"] * 3
    outbox.app.outbox(connection).send("redis://x/ship", "never")
    connection.rollback()
    connection.close()
    drain(relay)
    assert outbox.sink.payloads == [0, 1, 2]


@pytest.mark.req("OB-02")
def test_a_row_that_commits_late_is_not_skipped(outbox: OutboxWorld) -> None:
    """On PostgreSQL the earlier number commits after the later one was published; SQLite has one writer."""
    if outbox.engine.dialect.name == "sqlite":
        outbox.send("early")
        outbox.send("late")
        drain(outbox.relay())
        assert outbox.sink.payloads == ["early", "late"]
        return
    relay = outbox.relay()
    slow = outbox.engine.connect()
    outbox.app.outbox(slow).send("redis://x/ship", "early", key="k")
    outbox.send("late", "later", key="k")
    drain(relay)
    assert outbox.sink.payloads == ["late", "later"]
    slow.commit()
    slow.close()
    drain(relay)
    assert outbox.sink.payloads == ["late", "later", "early"]


@pytest.mark.req("OB-02")
def test_thousands_of_commits_out_of_order_all_arrive(outbox: OutboxWorld) -> None:
    relay, done = outbox.relay(), threading.Event()

    def write(seed: int) -> None:
        chance = random.Random(seed)
        for number in range(40):
            with outbox.engine.connect() as connection:
                for part in range(chance.randint(1, 5)):
                    outbox.app.outbox(connection).send("redis://x/ship", [seed, number, part], key=f"{seed}")
                time.sleep(chance.random() * 0.005)
                if chance.random() < 0.2:
                    connection.rollback()
                else:
                    connection.commit()
                    committed.append((seed, number))

    committed: list[tuple[int, int]] = []
    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    relaying = threading.Thread(target=lambda: [turn(relay) for _ in iter(lambda: not done.is_set(), False)])
    for each in (*writers, relaying):
        each.start()
    for each in writers:
        each.join()
    until(lambda: set(outbox.rows()) == {"published"})
    done.set()
    relaying.join()
    arrived = [tuple(each) for each in outbox.sink.payloads]
    assert sorted({each[:2] for each in arrived}) == sorted(committed)
    assert len(arrived) == len(set(arrived))
    for seed in range(4):  # a writer's own transactions follow each other, so their order is known
        of_key = [each for each in arrived if each[0] == seed]
        assert of_key == sorted(of_key)


@pytest.mark.req("OB-03")
def test_two_relays_keep_the_order_of_a_key(outbox: OutboxWorld) -> None:
    rules = outbox.send(*[[number % 5, number] for number in range(10)])
    assert len(rules) == 10
    for number in range(10, 400):
        outbox.send([number % 5, number], key=str(number % 5))
    relays, done = [outbox.relay(), outbox.relay()], threading.Event()
    outbox.sink.before = lambda: time.sleep(0.002)

    def work(relay: Relay) -> None:
        while not done.is_set():
            turn(relay)

    workers = [threading.Thread(target=work, args=(each,)) for each in relays]
    for each in workers:
        each.start()
    for number in range(400, 500):
        outbox.send([number % 5, number], key=str(number % 5))
    until(lambda: len(outbox.sink.arrived) >= 500)
    done.set()
    for each in workers:
        each.join()
    keyed = [each for each in outbox.sink.payloads if each[1] >= 10]
    assert len(keyed) == 490
    for key in range(5):
        numbers = [number for own, number in keyed if own == key]
        assert numbers == sorted(numbers)


@pytest.mark.req("OB-03", "OB-04")
def test_a_stuck_key_does_not_stop_the_others_and_keeps_its_order(outbox: OutboxWorld) -> None:
    stuck = True

    def refuse(message: Transaction) -> Exception | None:
        return RuntimeError("as it was asked") if stuck and message.payload == ["a", 0] else None

    outbox.sink.refuse = refuse
    relay = outbox.relay(rules=RelayRules(Backoff(0.01, cap=0.02), most_failures=10**6))
    for number in range(4):
        outbox.send(["a", number], key="a")
        outbox.send(["b", number], key="b")
        outbox.send(["-", number])
    until(lambda: (turn(relay), len(outbox.sink.arrived) == 8)[1])
    assert [each for each in outbox.sink.payloads if each[0] == "b"] == [["b", number] for number in range(4)]
    outbox.send(["a", 4], key="a")  # it comes while its key is stuck
    turn(relay)
    stuck = False
    until(lambda: (turn(relay), len(outbox.sink.arrived) == 13)[1])
    assert [each for each in outbox.sink.payloads if each[0] == "a"] == [["a", number] for number in range(5)]


@pytest.mark.req("OB-04")
def test_a_message_that_keeps_failing_becomes_a_dead_letter_and_can_be_redriven(outbox: OutboxWorld) -> None:
    broken = True
    outbox.sink.refuse = lambda each: RuntimeError("no") if broken and each.payload == "bad" else None
    letters = DeadLetters(outbox.engine)
    relay = outbox.relay()
    source = WithDeadLetters(relay, letters, consumer="outbox-relay", origin="outbox")
    (bad,) = outbox.send("bad", key="k", headers={"shape": "round"})
    outbox.send("good", key="k")

    def once() -> None:
        fetched = source.fetch_transactions(16)
        for each in fetched:
            relay.publish(each)
        source.settle_transactions([Settlement(each, Verdict.DONE) for each in fetched])

    until(lambda: (once(), letters.count(Filter()) == 1 and len(outbox.sink.arrived) == 1)[1])
    assert outbox.sink.payloads == ["good"]  # a dead letter does not hold its key
    (letter,) = letters.find(Filter(), limit=5)
    assert (letter.message_id, letter.consumer, letter.origin, letter.attempts) == (
        bad,
        "outbox-relay",
        "outbox",
        3,
    )
    assert [each.error for each in letter.history] == [letter.error] * 3
    assert outbox.rows() == ["moved", "published"]
    broken = False
    rca = Rca(category="infrastructure", root_cause="it was down", fix_ref="restarted")
    letters.redrive(Filter(consumer="outbox-relay", ids=(letter.id,)), rca=rca, operator="ann")
    until(lambda: (once(), len(outbox.sink.arrived) == 2)[1])
    redriven = outbox.sink.arrived[1]
    assert (redriven.id, redriven.payload, dict(redriven.metadata)) == (bad, "bad", {"shape": "round"})


@pytest.mark.req("OB-04")
def test_a_payload_that_the_sink_cannot_carry_is_dead_at_once(outbox: OutboxWorld) -> None:
    outbox.sink.refuse = lambda each: PayloadError("too large") if each.payload == "bad" else None
    relay = outbox.relay()
    outbox.send("bad", "good")
    drain(relay)
    assert outbox.sink.payloads == ["good"]
    assert outbox.rows() == ["dead", "published"]


@pytest.mark.req("OB-05")
def test_an_outage_of_a_sink_costs_no_failure_and_stops_no_other(outbox: OutboxWorld) -> None:
    away = True
    outbox.sink.refuse = lambda _: ConnectionError("refused") if away else None
    relay = outbox.relay()
    outbox.send(*range(5), key="k")
    outbox.send("fine", target="redis://x/other")
    until(lambda: (turn(relay), outbox.sinks["redis://x/other"].arrived)[1])
    until(lambda: (turn(relay), min(outbox.rows("attempts")[:5]) >= 3)[1])
    assert set(outbox.rows("failures")) == {0}
    [(_, waits)] = relay.away().items()
    assert waits.why == "ConnectionError: refused"
    away = False
    until(lambda: (turn(relay), len(outbox.sink.arrived) == 5)[1])
    assert outbox.sink.payloads == list(range(5))
    assert relay.away() == {}


@pytest.mark.req("OB-05")
def test_a_target_that_this_app_does_not_know_waits(outbox: OutboxWorld, tmp_path: Path) -> None:
    relay = Relay(outbox.engine, outbox.app.outbox.targets.address_of)

    def later(order: dict) -> None: ...  # type: ignore[type-arg]

    outbox.app.consumer(f"sqlite:///{tmp_path}/later.db", contract=None)(later)
    with outbox.engine.begin() as connection:
        outbox.app.outbox(connection).send(later, {"id": 1})
    assert outbox.rows("target") == ["consumer:later"]
    known = outbox.app.consumers.pop("later")
    turn(relay)
    assert outbox.rows() == ["ready"]
    outbox.app.consumers["later"] = known
    until(lambda: (turn(relay), outbox.rows() == ["published"])[1])
    relay.close()


@pytest.mark.req("OB-06")
def test_an_expired_lease_is_claimed_again_and_fences_the_first_relay(outbox: OutboxWorld) -> None:
    first, second = outbox.relay(lease=0.2), outbox.relay()
    outbox.send("one", "two", key="k")
    (stalled,) = first.fetch_transactions(1)
    until(lambda: (turn(second), len(outbox.sink.arrived) == 2)[1])
    assert outbox.rows("lost") == [1, 1]
    assert outbox.rows("attempts") == [2, 2]
    first.publish(stalled)  # too late: it sends copies, and changes nothing
    assert outbox.sink.payloads == ["one", "two"] * 2
    assert len({each.id for each in outbox.sink.arrived}) == 2
    assert outbox.rows() == ["published"] * 2


@pytest.mark.req("OB-06")
def test_a_lease_that_is_extended_is_kept(outbox: OutboxWorld) -> None:
    first, second = outbox.relay(lease=4.0), outbox.relay()
    outbox.send("one")
    fetched = first.fetch_transactions(1)
    for _ in range(6):
        assert not second.fetch_transactions(1)  # waits for a second
        first.extend_transactions(fetched)
    assert outbox.rows("lost") == [0]


@pytest.mark.req("OB-06")
def test_a_claim_that_ends_while_its_lease_is_extended_is_not_reported_as_lost(
    outbox: OutboxWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    relay = outbox.relay()
    rows: OutboxRows = relay._rows
    extend, end = rows.extend, rows.end

    outbox.send("ends before it is extended")
    (first,) = relay.fetch_transactions(1)
    monkeypatch.setattr(rows, "extend", lambda *given: (relay.publish(first), extend(*given))[1])
    relay.extend_transactions([first])

    def end_then_extend(*given: Any, **more: Any) -> int:
        left = end(*given, **more)
        relay.extend_transactions([second])
        return left

    outbox.send("is recorded, which the relay does not know yet")
    (second,) = relay.fetch_transactions(1)
    monkeypatch.setattr(rows, "extend", extend)
    monkeypatch.setattr(rows, "end", end_then_extend)
    relay.publish(second)
    assert "lease expired" not in caplog.text

    outbox.send("is lost")
    (third,) = relay.fetch_transactions(1)
    with outbox.engine.begin() as connection:
        connection.execute(text("UPDATE onceward_outbox SET token = token + 1 WHERE state = 'held'"))
    relay.extend_transactions([third])
    assert "lease expired" in caplog.text


@pytest.mark.req("OB-06")
def test_what_a_dead_owner_held_is_released_at_once(outbox: OutboxWorld) -> None:
    first, second = outbox.relay(), outbox.relay()
    first.owner = "dead"
    outbox.send("one")
    assert first.fetch_transactions(1)
    assert not second.fetch_transactions(1)
    assert second.release_owner("dead") == 1
    until(lambda: (turn(second), outbox.sink.arrived)[1])


@pytest.mark.req("OB-06")
def test_a_claim_that_was_not_begun_goes_back_uncounted(outbox: OutboxWorld) -> None:
    relay = outbox.relay()
    outbox.send("one")
    (fetched,) = relay.fetch_transactions(1)
    relay.settle_transactions([Settlement(fetched, Verdict.RETURNED)])
    assert (outbox.rows(), outbox.rows("attempts")) == (["ready"], [0])


@pytest.mark.req("OB-07")
def test_a_delayed_message_waits_in_the_table_and_does_not_hold_its_key(outbox: OutboxWorld) -> None:
    relay = outbox.relay()
    began = time.monotonic()
    outbox.send("in years", delay=minutes(60 * 24 * 800), key="k")
    outbox.send("soon", delay=1.0, key="k")
    outbox.send("now", key="k")
    until(lambda: (turn(relay), len(outbox.sink.arrived) == 2)[1])
    assert outbox.sink.payloads == ["now", "soon"]
    assert time.monotonic() - began >= 1.0
    assert outbox.rows() == ["delayed", "published", "published"]


@pytest.mark.req("OB-08")
def test_published_messages_are_removed_after_the_retention(outbox: OutboxWorld) -> None:
    outbox.send(*range(5))
    outbox.send("waits", delay=minutes(5))
    kept, brief = outbox.relay(), outbox.relay(retention=0.0)
    drain(kept)
    assert outbox.rows().count("published") == 5
    until(lambda: (brief.fetch_transactions(1), outbox.rows() == ["delayed"])[1])


@pytest.mark.req("OB-03")
def test_a_message_behind_one_that_was_removed_by_hand_comes_forward(outbox: OutboxWorld) -> None:
    relay = outbox.relay()
    outbox.send("first", "second", key="k")
    with outbox.engine.begin() as connection:
        connection.execute(text("UPDATE onceward_outbox SET state = 'behind'"))
        connection.execute(
            text("DELETE FROM onceward_outbox WHERE seq = (SELECT min(seq) FROM onceward_outbox)")
        )
    until(lambda: (turn(relay), outbox.sink.payloads == ["second"])[1])


def span_of(trace_id: int) -> trace.Span:
    return trace.NonRecordingSpan(
        trace.SpanContext(trace_id, 7, is_remote=False, trace_flags=trace.TraceFlags(1))
    )


@pytest.mark.req("OB-15")
def test_a_message_carries_the_trace_of_its_sender_not_of_the_relay(outbox: OutboxWorld) -> None:
    with trace.use_span(span_of(0xABC)):
        outbox.send("one")
    with trace.use_span(span_of(0xDEF)):
        drain(outbox.relay())
    (arrived,) = outbox.sink.arrived
    assert arrived.metadata["traceparent"] == f"00-{0xABC:032x}-{7:016x}-01"


@pytest.mark.req("OB-15")
def test_a_real_sink_keeps_the_trace_of_the_sender(outbox: OutboxWorld, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    with trace.use_span(span_of(0xABC)):
        outbox.send("one", target=url)
    relay = Relay(outbox.engine, lambda target: Address(target, sink=True))
    with trace.use_span(span_of(0xDEF)):
        drain(relay)
    relay.close()
    with SqliteConnector(tmp_path / "queue.db") as queue:
        (arrived,) = queue.fetch_transactions(5)
    assert arrived.metadata["traceparent"] == f"00-{0xABC:032x}-{7:016x}-01"


@pytest.mark.req("OB-07")
def test_claims_stay_flat_with_many_delayed_messages(outbox: OutboxWorld) -> None:
    """The plan of a claim reads no row that is delayed or published."""
    (first,) = outbox.send("template", delay=minutes(60))
    copy = """
        INSERT INTO onceward_outbox (message_id, target, key, state, at, digest, body, created_at)
        SELECT message_id || '-' || number, target, key, CASE WHEN number % 2 = 0 THEN 'delayed' ELSE 'published' END,
            at + number, digest, body, created_at
        FROM onceward_outbox, numbers WHERE message_id = :id
    """
    numbers = "WITH RECURSIVE numbers(number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < 999)"
    with outbox.engine.begin() as connection:
        connection.execute(
            text(copy.replace("SELECT message_id", f"{numbers} SELECT message_id", 1)), {"id": first}
        )
    with outbox.engine.connect() as connection:
        if outbox.engine.dialect.name == "postgresql":
            connection.execute(text("ANALYZE onceward_outbox"))
        explain = "EXPLAIN " if outbox.engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN "
        for query in (
            "SELECT seq FROM onceward_outbox WHERE state = 'ready' AND target = 'x' ORDER BY seq LIMIT 500",
            "SELECT min(at) FROM onceward_outbox WHERE state = 'delayed'",
            "SELECT seq FROM onceward_outbox WHERE state = 'held' AND at <= 5 ORDER BY at LIMIT 500",
        ):
            plan = "\n".join(str(tuple(row)) for row in connection.execute(text(explain + query)))
            assert "onceward_outbox_" in plan, plan
            assert "Seq Scan" not in plan, plan
    relay = outbox.relay()
    outbox.send("now")
    drain(relay)
    assert outbox.sink.payloads == ["now"]


@pytest.mark.req("OB-07")
def test_a_claim_reads_the_clock_once_and_the_index_up_to_there(outbox: OutboxWorld) -> None:
    """A clock in the condition itself would be asked for every message that is delayed."""
    if outbox.engine.dialect.name == "sqlite":
        return
    ran: list[tuple[str, Any]] = []
    event.listen(
        outbox.engine,
        "before_cursor_execute",
        lambda *given: ran.append((given[2], given[3])),
    )
    outbox.send("one", delay=minutes(60))
    OutboxRows(outbox.engine).claim(1, without=(), promote=True, lease=30.0, owner=None)
    promotions = [(sql, values) for sql, values in ran if "SKIP LOCKED" in sql and "at <=" in sql]
    assert len(promotions) == 2
    with outbox.engine.connect() as connection:
        connection.exec_driver_sql("SET enable_seqscan = off")
        for sql, values in promotions:
            plan = "\n".join(each[0] for each in connection.exec_driver_sql(f"EXPLAIN {sql}", values))
            assert "Index Cond: (at <= $" in plan or "Index Cond: (at <= (InitPlan" in plan, plan

"""The metrics, spans and logs of an inbox."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
from opentelemetry import trace

from onceward.inbox import Busy, Contract, ContractError, Event, Parked
from onceward.testing.inbox.driver import InboxDriver
from onceward.testing.inbox.effects import Provider, charging, effectful
from onceward.testing.inbox.samples import Killed, contract, event, never, raising, write
from onceward.testing.inbox.suite import InboxSuite
from onceward.testing.telemetry import record

SECRET = "4711-0815"
"""A value in payloads that must appear nowhere else."""


def outcome(inbox: InboxDriver, promised: Contract, delivered: Any, handler: Any) -> str:
    """The outcome of a delivery, as its caller sees it."""
    try:
        return str(inbox.process(promised, delivered, handler).handling)
    except Busy:
        return "busy"
    except Parked:
        return "parked"
    except ContractError:
        return "contract"
    except Exception:  # noqa: BLE001
        return "failed"


class InboxTelemetry(InboxSuite):
    @pytest.mark.req("CC-041")
    def test_the_metrics_of_each_consumer_equal_what_happened(self) -> None:
        strict, plain = contract("strict", sequencing="strict"), contract("plain")
        with record() as recording, self.inbox(strict, plain) as inbox:
            happened: Counter[tuple[str, str]] = Counter()
            for promised, delivered, handler in (
                (strict, event("s2", aggregate_id="a", sequence=2), write),
                (strict, event("s1", aggregate_id="a", sequence=1), write),
                (strict, event("s2", aggregate_id="a", sequence=2), write),
                (strict, event("s2", aggregate_id="a", sequence=2), never),
                (plain, event("p1"), raising(RuntimeError())),
                (plain, event("p1"), raising(RuntimeError())),
                (plain, event("p1"), write),
                (plain, event("p1"), never),
                (plain, event("p1"), never),
                (plain, event("p1", {"other": 1}), never),
                (plain, event("p2", event_type="order.lost"), never),
            ):
                happened[promised.consumer_id, outcome(inbox, promised, delivered, handler)] += 1
            self.abandon(inbox, plain, event("p3"))
            happened["plain", outcome(inbox, plain, event("p3"), never)] += 1
            assert happened == {
                ("strict", "parked"): 1,
                ("strict", "done"): 2,
                ("strict", "duplicate"): 1,
                ("plain", "failed"): 2,
                ("plain", "done"): 1,
                ("plain", "duplicate"): 2,
                ("plain", "contract"): 2,
                ("plain", "busy"): 1,
            }
            for (consumer, ended), count in happened.items():
                labels = {"consumer": consumer, "outcome": ended}
                assert recording.metric("onceward.inbox.events", **labels) == count
                assert recording.metric("onceward.inbox.duration", **labels) == count
            assert recording.metric("onceward.inbox.events") == happened.total()
            assert recording.metric("onceward.inbox.duplicates", consumer="plain") == 2
            assert recording.metric("onceward.inbox.duplicates", consumer="strict") == 1
            assert recording.metric("onceward.inbox.retries", consumer="plain") == 1
            assert recording.metric("onceward.inbox.events", event_type="order.lost") == 0, "not its type"

    @pytest.mark.req("CC-041")
    def test_how_many_attempts_an_event_took_is_in_the_distribution_of_retries(self) -> None:
        with record() as recording, self.inbox() as inbox:
            for failures in (0, 2, 2):
                delivered = event()
                for _ in range(failures):
                    outcome(inbox, contract(), delivered, raising(RuntimeError()))
                inbox.process(contract(), delivered, write)
            [point] = recording.points("onceward.inbox.retries")
            assert (point.count, point.sum) == (3, 4)

    @pytest.mark.req("CC-041")
    def test_the_id_of_an_event_is_on_its_span_and_never_an_attribute_of_a_metric(self) -> None:
        with record() as recording, self.inbox() as inbox:
            tracer = recording.tracer_provider.get_tracer("test")
            with tracer.start_as_current_span("delivery"):
                deliver_here(inbox, contract(), event("e-17"), write)
                deliver_here(inbox, contract(), event("e-17"), never)
            attributes = dict(recording.span("delivery").attributes or {})
            assert attributes["tracking_id"] == "e-17"
            assert attributes["consumer"] == "billing"
            for name in ("events", "duplicates", "duration", "retries"):
                for point in recording.points(f"onceward.inbox.{name}"):
                    assert "e-17" not in map(str, (point.attributes or {}).values())

    @pytest.mark.req("CC-032")
    def test_a_failure_is_logged_with_all_that_finds_the_event(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with self.inbox() as inbox:
            delivered = event("e1", aggregate_id="order-9", sequence=4)
            for _ in range(2):
                with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="broken"):
                    inbox.process(contract(), delivered, raising(RuntimeError("broken")))
            first, second = (r for r in caplog.records if r.levelno == logging.ERROR)
            assert all(
                word in first.getMessage() for word in ("billing", "e1", "order.paid", "order-9", "broken")
            )
            fields = vars(first)
            assert (fields["consumer"], fields["tracking_id"]) == ("billing", "e1")
            assert (fields["event_type"], fields["aggregate_id"]) == ("order.paid", "order-9")
            assert (fields["sequence"], fields["schema_version"]) == (4, 1)
            assert [vars(each)["lock_token"] for each in (first, second)] == [1, 2], "the attempts"
            assert first.exc_info is not None, "with its traceback"

    @pytest.mark.req("CC-032")
    def test_a_contract_failure_is_logged_and_raised(self, caplog: pytest.LogCaptureFixture) -> None:
        with self.inbox() as inbox:
            with caplog.at_level(logging.ERROR), pytest.raises(ContractError):
                inbox.process(contract(), event("e1", event_type="order.lost"), never)
            [line] = [r for r in caplog.records if r.levelno == logging.ERROR]
            assert vars(line)["tracking_id"] == "e1"

    def test_waiting_is_no_failure_and_logged_as_none(self, caplog: pytest.LogCaptureFixture) -> None:
        with self.inbox() as inbox:
            self.abandon(inbox, contract(), event("e1"))
            with caplog.at_level(logging.WARNING):
                assert inbox.is_busy(contract(), event("e1"), never)
            assert caplog.records == []

    @pytest.mark.req("CC-032")
    def test_no_payload_stands_in_any_log_nor_in_the_ledger(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "onceward")
        promised = contract(sequencing="strict")
        payload = {"card": SECRET, "nested": [SECRET]}

        def wrong(event: Event, session: Any) -> None:
            session.execute("INSERT INTO nowhere (card) VALUES (:card)", {"card": event.payload["card"]})

        with self.inbox(promised, effectful("outside")) as inbox:
            place = {"aggregate_id": "a", "payload": payload}
            first = event("e1", sequence=1, **place)
            for delivered, handler in (
                (event("e2", sequence=2, **place), never),
                (first, wrong),
                (first, raising(RuntimeError("broken"))),
                (first, write),
                (first, never),
                (event("e1", sequence=1, aggregate_id="a", payload=[SECRET, 2]), never),
                (event("e3", **place), never),
                (event("e4", payload={"schema_version": 9, "card": SECRET}, schema_version=9), never),
                (event("e5", payload=object_with(SECRET)), never),
            ):
                outcome(inbox, promised, delivered, handler)
            outcome(
                inbox, effectful("outside"), event("e6", payload), charging(Provider(TimeoutError("slow")))
            )
            self.crash(inbox, effectful("outside"), event("e6", payload), charging(Provider(Killed())))
            outcome(inbox, effectful("outside"), event("e6", payload), charging(Provider()))
            ledger = inbox.rows("SELECT last_error FROM onceward_attempts")
            effects = inbox.rows("SELECT error FROM onceward_effects")
        lines = [logging.Formatter().format(line) for line in caplog.records]
        assert len(lines) >= 5
        assert [line for line in lines if SECRET in line] == []
        assert SECRET not in f"{ledger} {effects}"


def object_with(secret: str) -> Any:
    class Odd:
        def __repr__(self) -> str:
            return secret

    return Odd()


def deliver_here(inbox: InboxDriver, promised: Contract, delivered: Any, handler: Any) -> None:
    """Deliver in the caller's span, which the driver's event loop does not inherit."""
    if not inbox.asynchronous:
        inbox.process(promised, delivered, handler)
        return
    span = trace.get_current_span()

    async def process() -> None:
        with trace.use_span(span):
            await inbox.inbox.process(promised, delivered, inbox.adapt(handler))

    inbox.wait_for(process())

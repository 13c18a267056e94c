"""A handler that does nothing: a write that is never awaited, a `yield`, a branch without code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.errors import ConfigurationError
from onceward.inbox import Event
from onceward.verify import ScenarioStatus, VerificationReport, examine_consumer
from tests.verification.consumers import EVENTS, INSERT, contract, setup, values

pytestmark = pytest.mark.req("CC-061")

TYPES = ["order", "ping"]
PING = {"tracking_id": "ping-1", "payload": {"total": 0}, "event_type": "ping"}


def examine(consumer: Any, events: Any = (*EVENTS[:1], PING), **given: Any) -> VerificationReport:
    return examine_consumer(consumer, **{"events": events, "setup": setup, "only": ["every-type"], **given})


def failure_of(report: VerificationReport, scenario: str) -> str:
    assert report[scenario].result is ScenarioStatus.FAILED, str(report)
    return str(report[scenario])


class ForgetsToAwait(AsyncConsumerTask):
    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute(INSERT, values(transaction))


class ForgetsTheSecond(AsyncConsumerTask):
    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        await session.execute(INSERT, values(transaction))
        session.execute("INSERT INTO marks VALUES (:id)", {"id": transaction.id})


class LosesATask(AsyncConsumerTask):
    """Its helper is a generator, whose code never runs."""

    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        self.write(transaction, session)

    def write(self, transaction: Transaction, session: Any) -> Iterator[Any]:
        yield session.execute(INSERT, values(transaction))


class IgnoresPings(ConsumerTask):
    contract = contract(event_types=TYPES)

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        if transaction.metadata["event_type"] == "order":
            session.execute(INSERT, values(transaction))


class UpdatesWhatIsNotThere(IgnoresPings):
    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        super().process_transaction(transaction, session)
        session.execute("UPDATE bills SET total = 0 WHERE id = 'nobody'")


class SaysThatItIgnoresPings(IgnoresPings):
    contract = contract(event_types=TYPES, no_effects=["ping"])


class SaysSoWrongly(IgnoresPings):
    contract = contract(event_types=TYPES, no_effects=["*"])


class DoesNothing(IgnoresPings):
    contract = contract(event_types=["ping"], no_effects=["*"])


def yields(event: Event, session: Any) -> Iterator[Any]:
    yield session.execute(INSERT, {"id": event.tracking_id, "total": 1})


@pytest.mark.parametrize("consumer", [ForgetsToAwait, ForgetsTheSecond])
def test_a_write_that_is_never_awaited_is_named(consumer: Any) -> None:
    finding = failure_of(examine(consumer, EVENTS[:1]), "clean")
    line = consumer.process_transaction.__code__.co_firstlineno + (2 if consumer is ForgetsTheSecond else 1)
    assert f"execute(…) at {__file__}:{line} was never awaited" in finding


def test_a_handler_whose_code_never_runs_is_found() -> None:
    report = examine(LosesATask, EVENTS[:2])
    assert "no sample of event type 'order' ('order-1', 'order-2') wrote a row" in failure_of(
        report, "every-type"
    )


def test_a_handler_that_yields_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the handler yields has a `yield`"):
        examine(yields, contract=contract())


@pytest.mark.parametrize("consumer", [IgnoresPings, UpdatesWhatIsNotThere])
def test_each_type_has_to_do_something(consumer: Any) -> None:
    (finding,) = examine(consumer)["every-type"].findings
    assert "no sample of event type 'ping' ('ping-1')" in str(finding)
    assert "no_effects=['ping']" in str(finding)


def test_the_contract_can_say_that_a_type_does_nothing_and_must_not_lie() -> None:
    assert examine(SaysThatItIgnoresPings).passed
    assert "but event 'order-1' wrote a row" in failure_of(examine(SaysSoWrongly), "every-type")
    assert examine(DoesNothing, [PING]).passed


# ── correct consumers that look idle ────────────────────────────────────────────────────────────────────


class RewritesTheSame(ConsumerTask):
    """Its row is as it was."""

    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute("UPDATE bills SET total = total WHERE id = 'fixed'")


class TouchesATime(ConsumerTask):
    """Only a column that is not compared changes, in an operation of its own."""

    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.run(lambda own: own.connection.execute(text("UPDATE bills SET total = total + 1")))


class Cancels(ConsumerTask):
    """A cancellation of an unknown order does nothing; of a known one it does."""

    contract = contract(event_types=["order", "cancel"])

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        if transaction.metadata["event_type"] == "order":
            session.execute(INSERT, values(transaction))
        else:
            session.execute("DELETE FROM bills WHERE id = :of", transaction.payload)


class OnlyCalls(ConsumerTask):
    contract = contract(mode="effectful")

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.effect("charge", lambda key: None)


class LatestWins(ConsumerTask):
    """The second sample is older than the first, and never reaches the handler."""

    contract = contract(event_types=TYPES, sequencing="latest-wins")

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute(INSERT, values(transaction))


def with_a_bill(engine: Engine) -> None:
    setup(engine)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO bills VALUES ('fixed', 1)"))


CANCELLATIONS = [
    {"tracking_id": f"cancel-{of}", "payload": {"of": of}, "event_type": "cancel"}
    for of in ("nothing", "order-1")
]
OVERTAKEN = [
    {**EVENTS[0], "aggregate_id": "a", "sequence": 2},
    {**PING, "aggregate_id": "a", "sequence": 1},
]


@pytest.mark.usual("RewritesTheSame", "OnlyCalls")
@pytest.mark.parametrize(
    ("consumer", "given"),
    [
        (RewritesTheSame, {"events": EVENTS[:1], "setup": with_a_bill}),
        (TouchesATime, {"events": EVENTS[:1], "setup": with_a_bill, "exclude": ["total"]}),
        (Cancels, {"events": [EVENTS[0], *CANCELLATIONS]}),
        (OnlyCalls, {"events": EVENTS[:1]}),
        (LatestWins, {"events": OVERTAKEN}),
    ],
)
def test_what_only_looks_idle_passes(consumer: Any, given: dict[str, Any]) -> None:
    report = examine(consumer, **given)
    assert report["every-type"].result is ScenarioStatus.PASSED, str(report)

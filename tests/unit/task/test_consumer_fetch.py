"""How a consumer fetches from its source, and what happens to the result."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from typing import Any

import pytest
import redis.exceptions

from onceward import Transaction
from onceward.errors import ConfigurationError
from onceward.task.exceptions import ExceptionCategory, FetchException, FetchTimeoutException
from onceward.task.mixins.policies import ConsumerPolicy
from onceward.task.report import StopReason
from onceward.task.settings import EngineSettings
from onceward.testing.clock import FakeClock
from tests.support.world import (
    SHORT,
    After,
    Deaf,
    ListSource,
    Until,
    World,
    business,
    consuming,
    results,
    retry,
    system,
    timeout,
    transactions,
)

pytestmark = pytest.mark.timeout(60)

FOREVER = Until(lambda: False)


# ── the call ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-10")
def test_fetch_is_asked_for_a_batch_with_the_extra_arguments(world: World) -> None:
    source = ListSource(transactions(3))
    world.consume(world.consumer(source=source), consuming(batch=7, extra={"queue": "orders", "wait": 2}))
    assert source.asked == [(7, {"queue": "orders", "wait": 2})] * 2


@pytest.mark.req("CE-10")
def test_the_batch_size_is_the_only_positional_argument(world: World) -> None:
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class Source:
        def fetch_transactions(self, *args: Any, **kwargs: Any) -> list[Transaction]:
            seen.append((args, kwargs))
            return []

        async def fetch_transactions_async(self, *args: Any, **kwargs: Any) -> list[Transaction]:
            return self.fetch_transactions(*args, **kwargs)

    world.consume(world.consumer(source=Source()), consuming(batch=4, extra={"a": 1}))
    assert seen == [((4,), {"a": 1})]


@pytest.mark.req("CE-10")
def test_every_fetch_gets_the_extra_arguments_of_the_policy_whatever_the_last_did_to_them(
    world: World,
) -> None:
    source = ListSource(script=[transactions(1), transactions(1, 1)])
    seen: list[list[str]] = []

    def on_fetch() -> None:
        kinds = source.asked[-1][1]["kinds"]
        seen.append(list(kinds))
        kinds.append("more")

    source.on_fetch = on_fetch
    world.consume(world.consumer(source=source), consuming(extra={"kinds": ["a"]}))
    assert seen == [["a"]] * 3


@pytest.mark.req("CE-10")
def test_the_named_connector_is_the_one_that_is_asked(world: World) -> None:
    orders, other = ListSource(transactions(2)), ListSource(transactions(5))
    task = world.consumer(source=other)
    task.connectors = {"other": other, "orders": orders}
    policy = ConsumerPolicy.model_validate({"steps": {"fetch": {"connector_name": "orders"}}})
    assert world.consume(task, policy).succeeded == 2
    assert other.asked == []


@pytest.mark.req("CE-10")
def test_an_unknown_connector_name_is_refused(world: World) -> None:
    policy = ConsumerPolicy.model_validate({"steps": {"fetch": {"connector_name": "nowhere"}}})
    with pytest.raises(ConfigurationError, match="nowhere"):
        world.consume(world.consumer(), policy)


# ── retries ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-11", "CE-24")
def test_a_failing_fetch_is_tried_again_with_backoff(world: World) -> None:
    clock = FakeClock()
    source = ListSource(script=[OSError(), OSError(), transactions(2)])
    task = world.consumer(source=source, clock=clock)
    report = world.consume(task, consuming(fetch=retry(3, backoff=1, backoff_multiplier=3, backoff_cap=2.5)))
    assert report.succeeded == 2
    assert clock.sleeps == [1, 2.5]
    assert (report.retries, report.fetches, report.empty_fetches) == (2, 2, 1)


@pytest.mark.req("CE-11")
def test_the_attempts_of_each_fetch_are_counted_anew(world: World) -> None:
    source = ListSource(script=[OSError(), transactions(1), OSError(), transactions(1, 1), OSError(), []])
    report = world.consume(world.consumer(source=source), consuming(fetch=retry(2)))
    assert report.succeeded == 2


@pytest.mark.req("CE-11", "CE-12")
def test_fetch_gives_up_after_max_attempts(world: World) -> None:
    source = ListSource(script=[OSError("down")] * 9)
    with pytest.raises(FetchException) as raised:
        world.consume(world.consumer(source=source), consuming(fetch=retry(4)))
    assert len(source.asked) == 4
    assert raised.value.report is not None
    assert raised.value.report.stop_reason is StopReason.FETCH_ERROR


@pytest.mark.req("CE-11", "CE-20")
def test_the_fetch_timeout_is_for_each_attempt(world: World) -> None:
    source = ListSource(script=[After(0.25, OSError()), After(0.25, OSError()), After(0.25, transactions(1))])
    report = world.consume(world.consumer(source=source), consuming(fetch=retry(3, timeout=0.7)))
    assert report.succeeded == 1
    assert report.timed_out == 0


@pytest.mark.req("CE-11")
def test_a_fetch_that_times_out_is_tried_again(world: World) -> None:
    source = ListSource(script=[FOREVER, transactions(1)])
    report = world.consume(world.consumer(source=source), consuming(fetch=retry(2, timeout=SHORT)))
    assert report.succeeded == 1
    assert (report.timed_out, report.retries) == (1, 1)


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-12")
def test_a_fetch_error_surfaces_with_its_cause(world: World) -> None:
    cause = ConnectionError("refused")
    with pytest.raises(FetchException) as raised:
        world.consume(world.consumer(source=ListSource(script=[cause])))
    assert not isinstance(raised.value, FetchTimeoutException)
    assert raised.value.__cause__ is cause
    assert "refused" in str(raised.value)


@pytest.mark.req("CE-12")
@pytest.mark.parametrize("given", [business("b"), system("s"), FetchException("f")], ids=repr)
def test_a_fetch_error_of_the_packages_own_keeps_its_text_and_cause(world: World, given: Exception) -> None:
    cause = OSError("disk")
    given.__cause__ = cause
    with pytest.raises(FetchException) as raised:
        world.consume(world.consumer(source=ListSource(script=[given])))
    chain: list[BaseException | None] = [raised.value]
    while chain[-1] is not None:
        chain.append(chain[-1].__cause__)
    assert given in chain
    assert cause in chain


@pytest.mark.req("CE-12")
def test_a_fetch_that_times_out_for_good_surfaces_as_a_timeout(world: World) -> None:
    source = ListSource(script=[FOREVER, FOREVER])
    with pytest.raises(FetchTimeoutException) as raised:
        world.consume(world.consumer(source=source), consuming(fetch=retry(2, timeout=SHORT)))
    assert isinstance(raised.value, TimeoutError)
    assert raised.value.category is ExceptionCategory.TIMEOUT
    assert raised.value.__cause__ is not None
    assert len(source.asked) == 2


@pytest.mark.req("CE-12")
@pytest.mark.parametrize("given", [TimeoutError("10 s"), timeout(), redis.exceptions.TimeoutError("10 s")])
def test_a_connectors_own_timeout_surfaces_as_a_timeout(world: World, given: Exception) -> None:
    with pytest.raises(FetchTimeoutException) as raised:
        world.consume(world.consumer(source=ListSource(script=[given])))
    assert raised.value.__cause__ is given


@pytest.mark.req("CE-12")
def test_what_counts_is_how_the_last_attempt_ended(world: World) -> None:
    cause = OSError()
    source = ListSource(script=[FOREVER, cause])
    with pytest.raises(FetchException) as raised:
        world.consume(world.consumer(source=source), consuming(fetch=retry(2, timeout=SHORT)))
    assert not isinstance(raised.value, FetchTimeoutException)
    assert raised.value.__cause__ is cause


@pytest.mark.req("CE-12")
def test_a_cancellation_out_of_the_connectors_own_code_is_a_fetch_error(world: World) -> None:
    source = ListSource(script=[asyncio.CancelledError()])
    with pytest.raises(FetchException):
        world.consume(world.consumer(source=source))


@pytest.mark.req("CE-12", "CE-20")
def test_a_fetch_that_does_not_end_even_then_does_not_hold_the_call(world: World) -> None:
    never = threading.Event()
    stuck = Deaf(never)
    task = world.consumer(source=ListSource(script=[stuck]), settings=EngineSettings(stuck_grace=0.1))
    with pytest.raises(FetchTimeoutException):
        world.consume_then(task, consuming(fetch=retry(3, timeout=SHORT)), never.set)
    assert not stuck.gave_up


@pytest.mark.req("CE-20")
def test_a_stuck_fetch_is_in_the_report(world: World) -> None:
    never = threading.Event()
    source = ListSource(script=[Deaf(never)])
    task = world.consumer(source=source, settings=EngineSettings(stuck_grace=0.1))
    with pytest.raises(FetchTimeoutException) as raised:
        world.consume_then(task, consuming(fetch=retry(3, timeout=SHORT)), never.set)
    assert len(source.asked) == 1
    assert raised.value.report is not None
    assert raised.value.report.stuck == 1


@pytest.mark.req("CE-36")
def test_a_fetch_error_after_stop_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source = ListSource(script=[OSError("lost in the end")])
    task = world.consumer(source=source)
    source.on_fetch = task.stop
    world.run_together((task.consume_transactions, consuming()))
    assert "lost in the end" in caplog.text


@pytest.mark.req("CE-36")
def test_every_failed_fetch_has_a_log_line_with_its_step(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    source = ListSource(script=[OSError("one"), OSError("two")])
    with pytest.raises(FetchException):
        world.consume(world.consumer(source=source), consuming(fetch=retry(2)))
    for text in ("one", "two"):
        lines = [record for record in caplog.records if text in record.getMessage()]
        assert {record.step for record in lines} == {"fetch"}  # type: ignore[attr-defined]


# ── in the loop ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-13")
def test_work_in_flight_finishes_before_a_fetch_error_is_raised(world: World) -> None:
    failed = threading.Event()
    source = ListSource(script=[transactions(2), OSError("down")])
    source.on_fetch = lambda: failed.set() if len(source.asked) == 2 else None
    task = world.consumer(lambda _: Until(failed.is_set, After(0.1)), success=results(None), source=source)
    with pytest.raises(FetchException) as raised:
        world.consume(task, consuming(concurrency=2, mode="continuous"))
    assert sorted(world.calls) == [
        ("process", "t0"), ("process", "t1"), ("success", "t0"), ("success", "t1"),
    ]  # fmt: skip
    assert raised.value.report is not None
    assert raised.value.report.succeeded == 2


@pytest.mark.req("CE-14")
def test_the_first_empty_fetch_ends_a_loop_that_does_not_stream(world: World) -> None:
    source = ListSource(script=[transactions(1), [], transactions(1, 1)])
    report = world.consume(world.consumer(source=source))
    assert report.succeeded == 1
    assert (report.fetches, report.empty_fetches) == (2, 1)
    assert report.stop_reason is StopReason.EMPTY


@pytest.mark.req("CE-14")
@pytest.mark.parametrize("empty", [[], (), None], ids=repr)
def test_nothing_is_empty_in_any_notation(world: World, empty: Any) -> None:
    report = world.consume(world.consumer(source=ListSource(script=[empty])))
    assert report.stop_reason is StopReason.EMPTY


# ── valid batches ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-33")
def test_more_than_the_batch_size_is_a_fetch_error_and_nothing_of_it_runs(world: World) -> None:
    source = ListSource(script=[transactions(4)])
    with pytest.raises(FetchException, match="4"):
        world.consume(world.consumer(source=source), consuming(batch=3))
    assert world.calls == []


@pytest.mark.req("CE-33")
@pytest.mark.parametrize(
    "batch", [42, "text", [1, 2], iter("ab"), {"a": 1}, {1}], ids=lambda given: type(given).__name__
)
def test_what_is_no_list_of_transactions_is_a_fetch_error(world: World, batch: Any) -> None:
    with pytest.raises(FetchException):
        world.consume(world.consumer(source=ListSource(script=[batch])))


@pytest.mark.req("CE-33")
@pytest.mark.parametrize("kind", [list, tuple, deque])
def test_any_sequence_of_transactions_is_a_batch(world: World, kind: Any) -> None:
    source = ListSource(script=[kind(transactions(3))])
    assert world.consume(world.consumer(source=source)).succeeded == 3


@pytest.mark.req("CE-33")
def test_handlers_get_the_fetched_objects_in_the_order_of_the_batch(world: World) -> None:
    batch = transactions(20)
    given = list(batch)
    got: list[Transaction] = []
    task = world.consumer(got.append, source=ListSource(script=[batch]))
    world.consume(task, consuming(batch=20))
    assert batch == given
    assert [id(each) for each in got] == [id(each) for each in given]


@pytest.mark.req("CE-33")
def test_batches_are_neither_merged_nor_split(world: World) -> None:
    source = ListSource(script=[transactions(2), transactions(3, 2), transactions(1, 5)])
    finished_at_fetch: list[int] = []
    source.on_fetch = lambda: finished_at_fetch.append(len(world.calls))
    world.consume(world.consumer(source=source), consuming(batch=3, concurrency=4))
    assert finished_at_fetch == [0, 2, 5, 6]

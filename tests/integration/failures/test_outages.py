"""Outages and rules of one process, in threads and asyncio, with and without a database."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from onceward import Contract, Limit, Onceward, Refuse, RetryLater, business, outage, retry, testing
from onceward.app.build import open_task, open_task_async
from onceward.connectors.urls import Address
from onceward.testing.servers import redis_server
from onceward.transaction import Transaction
from tests.support.schema import new_schema
from tests.support.wait import until

POLICY = {"loop": {"streaming": True}}


class Quota(Exception):
    pass


class Answered(Exception):
    """As httpx raises it: the answer has headers."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"answered {status}")
        self.response = type("Response", (), {"status_code": status, "headers": headers})()


class Line:
    """A consumer whose handler does what the test says, running in a thread."""

    def __init__(
        self, app: Onceward, directory: Path, *, asynchronous: bool, source: str = "", **rules: Any
    ) -> None:
        self.app = app
        self.handle: Callable[[Any], None] = lambda payload: None
        self.begun: list[Any] = []
        self.done: list[Any] = []
        self.times: list[float] = []
        source = source or f"sqlite:///{directory}/orders.db?synchronous=OFF"
        self.queue = Address(source).open(asynchronous=False)

        def work(payload: Any) -> None:
            self.begun.append(payload)
            self.times.append(time.monotonic())
            self.handle(payload)
            self.done.append(payload)

        if asynchronous:

            @app.consumer(source, policy=POLICY, contract=None, **rules)
            async def charge(payload: Any) -> None:
                work(payload)

        else:

            @app.consumer(source, policy=POLICY, contract=None, **rules)
            def charge(payload: Any) -> None:
                work(payload)

        self.asynchronous = asynchronous
        self._task: Any = None

    def send(self, *payloads: Any) -> None:
        self.queue.dispatch_transactions([Transaction(payload=each) for each in payloads])

    def __enter__(self) -> Line:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        until(lambda: self._task is not None)
        return self

    def _run(self) -> None:
        consumer = self.app.consumers.charge
        if self.asynchronous:

            async def run() -> None:
                async with open_task_async(self.app, consumer) as self._task:
                    await self._task.consume_transactions(consumer.policy)

            asyncio.run(run())
            return
        with open_task(self.app, consumer) as self._task:
            self._task.consume_transactions(consumer.policy)

    def __exit__(self, *_: object) -> None:
        self._task.stop()
        self._thread.join(60)
        self.queue.close()

    def is_down(self) -> bool:
        return bool(self.app.board.down)


def fail(error: Callable[[], Exception]) -> Callable[[Any], None]:
    def handle(_: Any) -> None:
        raise error()

    return handle


@pytest.fixture(params=["threads", "asyncio"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "asyncio")


@pytest.mark.req("OU-03", "OU-04")
@pytest.mark.parametrize("database", ["none", "sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def test_an_outage_holds_its_consumer_and_ends_by_itself(
    database: str, asynchronous: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with new_schema(request.getfixturevalue("postgres_url")) as schema:
        url = {"none": None, "sqlite": f"sqlite:///{tmp_path}/shop.db", "postgresql": schema.plain_url}[
            database
        ]
        line = Line(Onceward("shop", database=url), tmp_path, asynchronous=asynchronous)
        with line:
            line.handle = fail(lambda: TimeoutError("no answer"))
            line.send(*range(50))
            until(line.is_down)
            until(lambda: len(line.begun) >= 12)  # what was in flight, and some probes
            assert line.done == []
            assert max(line.begun.count(each) for each in line.begun) <= 4, "probes take different messages"
            line.handle = lambda _: None
            until(lambda: len(line.done) == 50)
            assert not line.is_down()
            assert sorted(line.done) == list(range(50))
            counts = until(lambda: (found := line.queue.counts())["leased"] == 0 and found)
            assert counts == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}


@pytest.mark.req("OU-03", "OU-04")
def test_a_few_that_are_poison_do_not_take_turns_as_probes(tmp_path: Path) -> None:
    """A Redis group delivers the oldest entry first, whichever was given back first."""

    def handle(payload: int) -> None:
        if payload < 3:
            raise ConnectionError("no such host")

    with redis_server() as server:
        rules = {"failures": {ConnectionError: outage(probe_every="200ms")}, "source": f"{server.url}/orders"}
        line = Line(Onceward("shop"), tmp_path, asynchronous=False, **rules)
        line.handle = handle
        line.send(*range(20))
        with line:
            until(lambda: len(line.done) == 17)


@pytest.mark.req("OU-11")
@pytest.mark.parametrize("rate", ["500/s", "2/s"])
def test_the_probes_of_a_limited_consumer_get_their_starts(
    rate: str, asynchronous: bool, tmp_path: Path
) -> None:
    rules = {"limit": Limit(rate=rate), "failures": {TimeoutError: outage(probe_every="0.1s", after=1)}}
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    with Line(app, tmp_path, asynchronous=asynchronous, **rules) as line:
        if rate == "500/s":
            line.send(*range(100))
            until(lambda: len(line.done) == 100)  # it reserves many starts at once now
        line.done.clear()
        line.handle = fail(lambda: TimeoutError("no answer"))
        line.send("a", "b", "c")
        until(line.is_down)
        tried = len(line.begun)
        until(lambda: len(line.begun) >= tried + 2)
        line.handle = lambda _: None
        until(lambda: sorted(line.done) == ["a", "b", "c"])
        assert not line.is_down()


@pytest.mark.req("OU-03")
def test_one_message_cannot_make_an_outage_and_a_success_ends_the_row(
    asynchronous: bool, tmp_path: Path
) -> None:
    line = Line(Onceward("shop"), tmp_path, asynchronous=asynchronous)
    with line:

        def handle(payload: Any) -> None:
            if payload in ("a", "b", "c"):
                raise ConnectionError("only for this one")

        line.handle = handle
        line.send("a")
        until(lambda: line.begun.count("a") >= 3)
        line.send("ok")
        until(lambda: line.done == ["ok"])
        line.send("b")
        until(lambda: line.begun.count("b") >= 2)
        assert not line.is_down()
        line.send("c")
        until(line.is_down)
        until(lambda: len(set(line.begun)) == 4)


@pytest.mark.req("OU-01", "OU-02", "OU-03")
def test_each_rule_does_what_it_says(asynchronous: bool, tmp_path: Path) -> None:
    app = Onceward("shop", failures={KeyError: business})
    line = Line(app, tmp_path, asynchronous=asynchronous, failures={Quota: retry("100ms", "400ms")})
    with line:

        def handle(payload: str) -> None:
            number = line.begun.count(payload)
            if payload == "refused":
                raise Refuse("card declined")
            if payload == "business":
                raise KeyError("no such card")
            if payload == "quota":
                raise RuntimeError("wrapped") from Quota()
            if payload == "later" and number < 4:
                raise RetryLater(after="150ms")
            if payload == "busy" and number < 2:
                raise Answered(429, **{"retry-after": "1"})
            if payload == "no rule" and number < 2:
                raise Answered(500, **{"retry-after": "1"})
            if payload == "own rule" and number < 2:
                raise Quota from Answered(500, **{"retry-after": "1"})

        line.handle = handle
        line.send("refused", "business", "quota", "later", "busy", "no rule", "own rule")
        until(lambda: sorted(line.done) == ["busy", "later", "no rule", "own rule"])
        until(lambda: line.queue.counts()["dead"] == 3)
        letters = {each.transaction.payload: each for each in line.queue.dead_letters() if each.transaction}
    assert letters["refused"].deliveries == letters["business"].deliveries == 1
    assert letters["quota"].deliveries == 3

    def gaps(payload: str) -> list[float]:
        at = [when for when, each in zip(line.times, line.begun, strict=True) if each == payload]
        return [after - before for before, after in pairwise(at)]

    first, second = gaps("quota")
    assert first >= 0.1
    assert second >= 0.4
    assert min(gaps("later")) >= 0.15
    assert min(gaps(each)[0] for each in ("busy", "no rule", "own rule")) >= 1.0


@pytest.mark.req("OU-03")
def test_poison_is_found_during_an_outage_and_does_not_end_it(asynchronous: bool, tmp_path: Path) -> None:
    line = Line(
        Onceward("shop", failures={Quota: outage(probe_every="100ms", after=2)}),
        tmp_path,
        asynchronous=asynchronous,
    )
    with line:

        def handle(payload: Any) -> None:
            if payload == "poison":
                raise Refuse("never")
            raise Quota

        line.handle = handle
        line.send(1, 2)
        until(line.is_down)
        line.send("poison", 3)
        until(lambda: line.queue.counts()["dead"] == 1)
        probes = len(line.begun)
        until(lambda: len(line.begun) >= probes + 3)
        assert line.is_down()
        line.handle = lambda _: None
        until(lambda: sorted(line.done) == [1, 2, 3])


def test_a_predicate_that_fails_is_reported_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(error: BaseException) -> bool:
        raise ZeroDivisionError("of the rule")

    line = Line(Onceward("shop"), tmp_path, asynchronous=False, failures={broken: business})
    with line:
        line.handle = lambda _: (
            (_ for _ in ()).throw(ValueError("of the handler")) if len(line.begun) < 2 else None
        )
        line.send(1)
        until(lambda: line.done == [1])
    assert "a failure rule of charge failed, and is ignored: ZeroDivisionError: of the rule" in caplog.text


@pytest.mark.req("OU-02")
@pytest.mark.parametrize("kind", ["threads", "asyncio", "contract"])
def test_a_group_of_wishes_for_a_later_delivery_is_one(kind: str, tmp_path: Path) -> None:
    """As `asyncio.TaskGroup` raises it. A failure would become a dead letter at once here."""
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db", failures={Exception: business})
    begun: list[str] = []

    def work(payload: str) -> None:
        begun.append(payload)
        if payload == "mixed":
            raise ExceptionGroup("", [RetryLater(after="100ms"), ValueError()])
        if len(begun) < 3:
            raise ExceptionGroup("", [RetryLater(after="100ms"), ExceptionGroup("", [RetryLater(after=0.2)])])

    async def in_asyncio(payload: str) -> None:
        work(payload)

    def with_session(payload: str, session: Any) -> None:
        work(payload)

    function: Any = {"threads": work, "asyncio": in_asyncio, "contract": with_session}[kind]
    promise = Contract(
        consumer_id="x",
        event_types=["*"],
        owner_team="tests",
        idempotency_mechanism="record and row together",
    )
    app.consumer("memory://orders", name="charge", contract=promise if kind == "contract" else None)(function)
    with testing.app(app) as shop:
        shop.send(function, "all")
        assert shop.advance("1m").postponed == 2
        assert begun == ["all"] * 3
        assert shop.dead_letters == []
        shop.send(function, "mixed")
        shop.advance("10s")
        assert len(shop.dead_letters) == 1

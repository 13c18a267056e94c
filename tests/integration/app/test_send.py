"""`charge.send(order)`: over connections that the process keeps, in threads and asyncio."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine, text

from onceward import Contract, Onceward, Transaction
from onceward.app.build import open_task
from onceward.connectors.kept import KeptConnectors, kept
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.task.exceptions import InputException, NotSentException
from onceward.testing import record
from onceward.testing.servers import Server, redis_server
from tests.support.wait import until
from tests.support.world import World

AWAY = "redis://:hunter2@127.0.0.1:1/orders"
"""An address without a server."""


def charging(url: str, **more: Any) -> Any:
    app = Onceward("shop", **more)

    @app.consumer(url)
    def charge(order: dict[str, Any]) -> None: ...

    return charge


def send(world: World, function: Any, *messages: Any, **more: Any) -> list[str]:
    if not world.asynchronous:
        return [function.send(each, **more) for each in messages]

    async def main() -> list[str]:
        return [await function.send_async(each, **more) for each in messages]

    return asyncio.run(main())


def send_many(world: World, function: Any, messages: Any) -> Any:
    if world.asynchronous:
        return asyncio.run(function.send_many_async(messages))
    return function.send_many(messages)


def sent(url: str, count: int = 5000) -> list[Transaction]:
    with Address(url).open(asynchronous=False) as connector:
        return list(connector.fetch_transactions(count))


def connections_to(client: redis.Redis) -> set[str]:
    mine = client.client_id()
    return {each["id"] for each in client.client_list() if int(each["id"]) != mine}


@pytest.fixture
def own_redis() -> Iterator[Server]:
    """A Redis that only one test talks to. It survives a kill."""
    with redis_server(durable=True) as server:
        yield server


@pytest.fixture(params=["memory", "sqlite", "redis"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        return f"{request.getfixturevalue('redis_url')}/{uuid.uuid4().hex}"
    return f"sqlite:///{tmp_path}/orders.db" if request.param == "sqlite" else f"memory://{tmp_path}"


@pytest.mark.req("SE-01")
def test_a_message_is_in_the_source_of_its_consumer_when_send_returns(world: World, queue: str) -> None:
    charge = charging(queue)
    [first] = send(world, charge, {"total": 3})
    [second] = send(world, charge, {"total": 4}, id="order-4")
    whole = Transaction(payload="whole")
    [third] = send(world, charge, whole)
    assert [(each.id, each.payload) for each in sent(queue)] == [
        (first, {"total": 3}),
        (second, {"total": 4}),
        (third, "whole"),
    ]
    assert (second, third) == ("order-4", whole.id)


@pytest.mark.req("SE-01")
def test_many_messages_keep_their_order(world: World, queue: str) -> None:
    report = send_many(world, charging(queue), ({"number": number} for number in range(1200)))
    assert report.succeeded == 1200
    assert [each.payload["number"] for each in sent(queue)] == list(range(1200))


def test_an_async_iterable_can_be_sent(tmp_path: Path) -> None:
    async def messages() -> AsyncIterator[int]:
        for number in range(3):
            await asyncio.sleep(0)
            yield number

    url = f"memory://{tmp_path}"
    assert asyncio.run(charging(url).send_many_async(messages())).succeeded == 3
    assert [each.payload for each in sent(url)] == [0, 1, 2]


def test_the_function_is_still_the_function(tmp_path: Path) -> None:
    app = Onceward("shop")

    def charge(order: int) -> int:
        return order + 1

    decorated = app.consumer(f"memory://{tmp_path}")(charge)
    assert decorated is charge
    assert decorated(3) == 4
    assert sent(f"memory://{tmp_path}") == []


@pytest.mark.req("SE-01")
def test_a_producer_sends_what_it_makes(world: World, queue: str) -> None:
    app = Onceward("shop")
    if world.asynchronous:

        @app.producer(queue)
        async def place(*totals: int) -> AsyncIterator[int]:
            for total in totals:
                yield total

        report = asyncio.run(place.send_async(3, 4))
    else:

        @app.producer(queue)
        def place(*totals: int) -> Iterator[int]:
            yield from totals

        report = place.send(3, 4)
    assert report.succeeded == 2
    assert [each.payload for each in sent(queue)] == [3, 4]


def test_a_function_with_two_sources_does_not_guess(tmp_path: Path) -> None:
    app = Onceward("shop")

    @app.consumer(f"memory://{tmp_path}/b", name="second")
    @app.consumer(f"memory://{tmp_path}/a", name="first")
    def charge(order: int) -> None: ...

    with pytest.raises(ConfigurationError, match=r"charge is declared more than once.*app\.consumers"):
        charge.send(1)
    app.consumers.second.send(2)
    assert [each.payload for each in sent(f"memory://{tmp_path}/b")] == [2]


def test_one_message_is_not_many(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"charge\.send_many takes an iterable of messages, not dict; .*charge\.send"
    ):
        charging(f"memory://{tmp_path}").send_many({"total": 3})


@pytest.mark.req("SE-01")
def test_a_message_gets_the_event_type_that_its_consumer_expects(tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    url = f"memory://{tmp_path}"

    @app.consumer(url, contract=Contract(
        consumer_id="charge", event_types=("order.placed",), owner_team="shop",
        idempotency_mechanism="the inbox",
    ))  # fmt: skip
    def charge(order: dict[str, Any], session: Any) -> None: ...

    charge.send({"total": 3})
    charge.send({"total": 4, "event_type": "order.changed"})
    assert [dict(each.metadata) for each in sent(url)] == [{"event_type": "order.placed"}, {}]


# ── connections ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("SE-02")
def test_threads_share_few_connections_and_few_round_trips(own_redis: Server) -> None:
    url = f"{own_redis.url}/orders"
    charge = charging(url)
    charge.send(0)
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_resetstat()
        start = threading.Barrier(16)

        def work(_: int) -> None:
            start.wait()
            for number in range(50):
                charge.send(number)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, range(16)))
        assert len(connections_to(client)) == 1
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] < 800
        assert client.xlen("orders") == 801
    drop(url)


@pytest.mark.req("SE-02")
def test_tasks_share_few_connections_and_few_round_trips(own_redis: Server) -> None:
    charge = charging(f"{own_redis.url}/orders")

    async def main() -> None:
        await charge.send_async(0)
        await asyncio.to_thread(client.config_resetstat)
        await asyncio.gather(*(charge.send_async(number) for number in range(500)))
        assert len(await asyncio.to_thread(connections_to, client)) == 1

    with redis.Redis.from_url(own_redis.url) as client:
        asyncio.run(main())
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] < 20
        assert client.xlen("orders") == 501
        until(lambda: not connections_to(client), what="the loop's connections are closed with it")


@pytest.mark.req("SE-02")
def test_each_event_loop_has_its_own(redis_url: str) -> None:
    url = f"{redis_url}/{uuid.uuid4().hex}"
    charge = charging(url)

    async def main() -> None:
        for number in range(5):
            await charge.send_async(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: [asyncio.run(main()) for _ in range(3)], range(4)))
    charge.send(99)
    assert len(sent(url)) == 61


def test_a_loop_that_never_shuts_down_its_generators_leaves_nothing_open(tmp_path: Path) -> None:
    own = KeptConnectors()

    async def take() -> None:
        await own.take_async(Address(f"memory://{tmp_path}"))

    for _ in range(3):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(take())
        loop.close()
    assert len(own._loops) == 1


PROGRAM = """
import asyncio, os, sys
from onceward import Onceward

app = Onceward("shop")

@app.consumer(sys.argv[1])
def charge(order: int) -> None: ...

charge.send(1)
child = os.fork()
charge.send(2 if child else 3)
if not child:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
charge.send(4)
asyncio.run(charge.send_async(5))
"""


@pytest.mark.usual("redis")
@pytest.mark.req("SE-03")
@pytest.mark.parametrize("kind", ["sqlite", "redis", "postgres"])
def test_parent_and_child_of_a_fork_send_and_exit_quietly(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/orders.db"
    if kind == "redis":
        url = f"{request.getfixturevalue('redis_url')}/{uuid.uuid4().hex}"
    if kind == "postgres":
        database = request.getfixturevalue("postgres_url").replace("postgresql+psycopg", "postgresql")
        url = (
            f"{database}/{uuid.uuid4().hex}"
            if "?" not in database
            else f"{database}&queue={uuid.uuid4().hex}"
        )
    done = subprocess.run(
        # Python 3.12 and later warn of any fork with threads.
        [sys.executable, "-W", "error::ResourceWarning", "-W", "ignore::DeprecationWarning", "-c", PROGRAM, url],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(each.payload for each in sent(url)) == [1, 2, 3, 4, 5]


@pytest.mark.req("SE-04")
def test_a_connection_that_broke_is_replaced(world: World, own_redis: Server) -> None:
    url = f"{own_redis.url}/orders"
    charge = charging(url)

    async def main() -> None:
        await charge.send_async(1)
        own_redis.kill()
        own_redis.start()
        await charge.send_async(2)

    if world.asynchronous:
        asyncio.run(main())
    else:
        charge.send(1)
        own_redis.kill()
        own_redis.start()
        charge.send(2)
    assert [each.payload for each in sent(url)] == [1, 2]
    drop(url)


@pytest.mark.req("SE-04")
def test_a_connection_that_the_database_ended_is_replaced(postgres_url: str) -> None:
    url = f"{postgres_url.replace('postgresql+psycopg', 'postgresql')}&queue={uuid.uuid4().hex}"
    charge = charging(f"{url}&application_name={uuid.uuid4().hex}")
    charge.send(1)
    engine = create_engine(postgres_url)
    with engine.begin() as connection:
        name = charge.send.__self__.source.settings["application_name"]
        ended = connection.execute(
            text(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = :name"
            ),
            {"name": name},
        ).scalar()
    engine.dispose()
    assert ended
    with suppress(NotSentException):  # only the first finds out
        charge.send(2, id="two")
    charge.send(2, id="two")
    charge.send(3)
    assert {each.payload for each in sent(url)} == {1, 2, 3}


@pytest.mark.req("SE-04")
def test_a_queue_whose_file_was_replaced_is_opened_again(tmp_path: Path) -> None:
    file = tmp_path / "orders.db"
    charge = charging(f"sqlite:///{file}")
    charge.send(1)
    file.rename(tmp_path / "moved.db")
    with pytest.raises(NotSentException, match=r"orders\.db"):
        charge.send(2)
    charge.send(3)
    assert [each.payload for each in sent(f"sqlite:///{file}")] == [3]


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("SE-05")
def test_a_message_that_did_not_arrive_is_an_error(world: World) -> None:
    with pytest.raises(NotSentException) as raised:
        send(world, charging(AWAY), {"total": 3}, id="order-3")
    text = str(raised.value)
    assert text.startswith("charge: 1 of 1 messages did not reach redis://:***@127.0.0.1:1/orders: ")
    assert "hunter2" not in text
    assert "to send it again, give it the same id, 'order-3'" in text
    assert raised.value.report is not None
    assert raised.value.report.failed == 1


@pytest.mark.req("SE-05")
def test_of_many_the_unsendable_one_fails_alone(world: World, queue: str) -> None:
    messages = [0, 1, Transaction(payload=object()), 3]
    with pytest.raises(NotSentException, match="charge: 1 of 4 messages did not reach") as raised:
        send_many(world, charging(queue), messages)
    assert raised.value.report is not None
    assert (raised.value.report.succeeded, raised.value.report.failed) == (3, 1)
    assert [each.payload for each in sent(queue)] == [0, 1, 3]


@pytest.mark.req("SE-05")
def test_what_came_before_an_error_of_the_iterable_is_sent(world: World, queue: str) -> None:
    def messages() -> Iterator[int]:
        yield 1
        yield 2
        raise StopAsyncIteration("not an end")

    with pytest.raises(InputException, match=r"StopAsyncIteration|not an end") as raised:
        send_many(world, charging(queue), messages())
    assert raised.value.report is not None
    assert raised.value.report.succeeded == 2
    assert [each.payload for each in sent(queue)] == [1, 2]


@pytest.mark.req("SE-05")
def test_an_id_of_another_message_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the transaction has the id 'a' already"):
        charging(f"memory://{tmp_path}").send(Transaction(id="a"), id="b")


def test_a_slow_iterable_does_not_hold_back_what_it_yielded(tmp_path: Path) -> None:
    url = f"memory://{tmp_path}"
    charge = charging(url)

    def messages() -> Iterator[int]:
        yield 1
        yield until(lambda: 2)
        threading.Event().wait(0.05)
        yield 3
        assert sent(url), "the others were sent while this one was made"

    assert charge.send_many(messages()).succeeded == 3


# ── handlers and telemetry ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("SE-06")
def test_a_handler_with_a_contract_is_warned_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    url = f"memory://{tmp_path}"

    @app.consumer(f"{url}/ship")
    def ship(order: int) -> None: ...

    @app.consumer(url, contract=Contract(
        consumer_id="charge", event_types=("*",), owner_team="shop",
        idempotency_mechanism="the inbox",
    ))  # fmt: skip
    def charge(order: dict[str, Any], session: Any) -> None:
        ship.send(order)

    with open_task(app, app.consumers.charge) as task:
        for _ in range(2):
            assert task.start_processing(Transaction(payload={})).error is None
    lines = [
        line.getMessage() for line in caplog.records if "outside of its transaction" in line.getMessage()
    ]
    assert len(lines) == 1
    assert lines[0].startswith("charge sends to ship outside of its transaction")
    assert "session.send(ship, …)" in lines[0]


@pytest.mark.req("SE-06")
def test_telemetry_sees_a_send_as_a_producer_of_that_name(world: World, tmp_path: Path) -> None:
    charge = charging(f"memory://{tmp_path}")
    with record() as recording:
        send(world, charge, 1)
    spans = [(span.name, dict(span.attributes or {}).get("task")) for span in recording.spans()]
    assert ("produce", "charge") in spans


def drop(url: str) -> None:
    """Close the kept connector to a server that ends with its test."""
    address = Address(url, sink=True)
    kept.drop(address, kept.take(address))

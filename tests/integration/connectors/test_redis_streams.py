"""Specific to Redis Streams: recovery, trimming, histories, clients, lost connections, and the engine."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
import redis
import redis.asyncio

from onceward import AsyncConsumerTask, ConsumerTask, ProducerTask, Transaction
from onceward._sync import run_blocking
from onceward.connectors import BurialReason, PayloadError
from onceward.connectors.redis_streams import AsyncRedisStreamsConnector, RedisStreamsConnector
from onceward.errors import ConfigurationError
from onceward.task.exceptions import FetchException, TransactionException
from onceward.task.report import Report
from onceward.testing.connectors.driver import ConnectorDriver
from onceward.testing.servers import Server, redis_server
from onceward.transaction import Settlement, Verdict
from tests.support.pending_entries import age
from tests.support.queue.proxy import Proxy, proxy
from tests.support.wait import until, until_async
from tests.support.world import World, consuming, retry


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as made:
        yield made


@pytest.fixture
def stream() -> str:
    return f"test:{uuid4().hex}"


def numbered(count: int) -> list[Transaction]:
    return [Transaction(id=f"t{number}", payload=number) for number in range(count)]


class Collect(ConsumerTask):
    def process_transaction(self, transaction: Transaction) -> None:
        self.services["seen"].append(transaction.id)


# ── recovery ────────────────────────────────────────────────────────────────────────────────────────────


def test_entries_of_a_killed_process_come_back_by_themselves(redis_url: str, stream: str) -> None:
    script = f"""
        from onceward.connectors.redis_streams import RedisStreamsConnector
        connector = RedisStreamsConnector({redis_url!r}, {stream!r}, lease=0.5)
        print(len(connector.fetch_transactions(10)), flush=True)
        import time; time.sleep(60)
    """
    with RedisStreamsConnector(redis_url, stream, lease=0.5) as connector:
        connector.dispatch_transactions(numbered(5))
        victim = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"5\n"
        victim.kill()
        victim.communicate()
        assert connector.fetch_transactions(10) == []
        recovered: list[Transaction] = []

        def is_all_there() -> bool:
            recovered.extend(connector.fetch_transactions(10))
            return len(recovered) >= 5

        until(is_all_there)
        assert sorted(each.id for each in recovered) == ["t0", "t1", "t2", "t3", "t4"]


def test_while_new_entries_keep_coming_recovered_ones_are_a_bounded_share(
    redis_url: str, stream: str, client: redis.Redis
) -> None:
    with RedisStreamsConnector(redis_url, stream) as connector:
        connector.dispatch_transactions(numbered(200))
        connector.fetch_transactions(100)
        age(client, stream, 61)
        connector._queue._recover_at = 0.0
        batch = connector.fetch_transactions(40)
        old = [each for each in batch if each.payload < 100]
        assert len(batch) == 40
        assert len(old) == 10


def test_the_history_of_failures_is_kept_with_the_dead_letter(
    redis_url: str, stream: str, client: redis.Redis
) -> None:
    with RedisStreamsConnector(redis_url, stream, max_deliveries=2) as connector:
        connector.dispatch_transactions(numbered(1))
        for text in ("first", "second"):
            [fetched] = connector.fetch_transactions(1)
            error = TransactionException(text, "SYSTEM", fetched.id)
            connector.settle_transactions([Settlement(fetched, Verdict.FAILED, error)])
            age(client, stream, 61)
        [letter] = connector.dead_letters()
        assert (letter.reason, letter.deliveries, letter.category) == (
            BurialReason.MAX_DELIVERIES,
            2,
            "SYSTEM",
        )
        [(_, fields)] = client.xrange(connector._queue.dead)
        history = [json.loads(line) for line in fields[b"history"].splitlines()]
        assert [(each["delivery"], each["error"]) for each in history] == [
            (1, "SYSTEM [t0]: first"),
            (2, "SYSTEM [t0]: second"),
        ]
        assert client.hlen(connector._queue.history) == 0
        assert client.xpending(stream, "onceward")["pending"] == 0


def test_an_entry_whose_body_was_trimmed_is_reported_and_cleared(
    redis_url: str, stream: str, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisStreamsConnector(redis_url, stream) as connector:
        connector.dispatch_transactions(numbered(3))
        connector.fetch_transactions(3)
        age(client, stream, 61)
        client.xtrim(stream, maxlen=1, approximate=False)
        assert [each.id for each in connector.fetch_transactions(10)] == ["t2"]
        assert [letter.reason for letter in connector.dead_letters()] == [BurialReason.TRIMMED] * 2
        assert sum("trimmed" in record.getMessage() for record in caplog.records) == 2
        assert client.xpending(stream, "onceward")["pending"] == 1


@pytest.mark.req("CN-11")
@pytest.mark.parametrize(("verdict", "history"), [(Verdict.RETURNED, 0), (Verdict.FAILED, 1)])
def test_an_entry_that_was_trimmed_while_a_worker_had_it_becomes_a_dead_letter_unless_it_is_done(
    redis_url: str,
    stream: str,
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    verdict: Verdict,
    history: int,
) -> None:
    with RedisStreamsConnector(redis_url, stream, lease=0.6) as connector:
        connector.dispatch_transactions(numbered(3))
        done, ended, extended = connector.fetch_transactions(3)
        client.xtrim(stream, maxlen=0, approximate=False)
        connector.extend_transactions([done, ended, extended])
        assert client.xpending(stream, "onceward")["pending"] == 3
        error = TransactionException("no", "SYSTEM", ended.id)
        connector.settle_transactions(
            [Settlement(done, Verdict.DONE), Settlement(ended, verdict, error, delay=5.0)]
        )
        connector.hasten_transactions([ended])
        [letter] = connector.dead_letters()
        assert (letter.reason, letter.deliveries, len(letter.history)) == (BurialReason.TRIMMED, 1, history)
        assert client.xpending(stream, "onceward")["pending"] == 1
        until(lambda: connector.fetch_transactions(10) or len(connector.dead_letters()) == 2)
        assert [letter.reason for letter in connector.dead_letters()] == [BurialReason.TRIMMED] * 2
        assert sum("trimmed" in record.getMessage() for record in caplog.records) == 2
        assert client.xpending(stream, "onceward")["pending"] == 0


@pytest.mark.req("CN-04")
@pytest.mark.parametrize("values", [b"", b"odd", b"\xff\x00", b"-1", b"9" * 30])
def test_no_entry_of_the_dead_letters_hides_those_behind_it(
    redis_url: str, stream: str, client: redis.Redis, values: bytes
) -> None:
    with RedisStreamsConnector(redis_url, stream, on_failure="dead_letter") as connector:
        names = (
            "id",
            "body",
            "reason",
            "category",
            "error",
            "deliveries",
            "enqueued_at",
            "died_at",
            "history",
        )
        client.xadd(connector._queue.dead, {"something": "else"})
        client.xadd(connector._queue.dead, dict.fromkeys(names, values))
        connector.dispatch_transactions(numbered(1))
        [transaction] = connector.fetch_transactions(1)
        connector.settle_transactions([Settlement(transaction, Verdict.FAILED)])
        letters = connector.dead_letters()
        assert [letter.transaction_id for letter in letters][2:] == ["t0"]
        connector.forget_dead([letter.key for letter in letters])
        assert connector.dead_letters() == []


def test_an_entry_of_somebody_else_becomes_a_dead_letter(
    redis_url: str, stream: str, client: redis.Redis
) -> None:
    client.xadd(stream, {"foo": "bar"})
    with RedisStreamsConnector(redis_url, stream) as connector:
        connector.dispatch_transactions(numbered(1))
        assert [each.id for each in connector.fetch_transactions(10)] == ["t0"]
        assert [letter.reason for letter in connector.dead_letters()] == [BurialReason.UNDECODABLE]


def test_what_is_returned_for_later_comes_later_and_its_delivery_is_not_counted(
    redis_url: str, stream: str, client: redis.Redis
) -> None:
    with RedisStreamsConnector(redis_url, stream, max_deliveries=1) as connector:
        connector.dispatch_transactions(numbered(1))
        [fetched] = connector.fetch_transactions(1)
        connector.settle_transactions([Settlement(fetched, Verdict.RETURNED, delay=30.0)])
        assert connector.fetch_transactions(1) == []
        assert connector.counts() == {"ready": 0, "leased": 0, "delayed": 1, "dead": 0}
        age(client, stream, 31)
        assert [each.id for each in connector.fetch_transactions(1)] == ["t0"]


@pytest.mark.req("CN-12")
def test_a_delay_longer_than_the_lease_survives_the_worker_and_a_restart_of_redis(
    durable_redis: Server,
) -> None:
    url = durable_redis.url
    script = f"""
        import os, signal
        from onceward.connectors.redis_streams import RedisStreamsConnector
        from onceward.transaction import Settlement, Verdict
        connector = RedisStreamsConnector({url!r}, "orders", lease=1.0, redelivery_delay=200.0)
        failed, returned = connector.fetch_transactions(2)
        back = Settlement(returned, Verdict.RETURNED, delay=100.0)
        connector.settle_transactions([Settlement(failed, Verdict.FAILED), back])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with RedisStreamsConnector(url, "orders") as sender:
        sender.dispatch_transactions(numbered(2))
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert killed.returncode == -signal.SIGKILL
    durable_redis.kill()
    durable_redis.start()
    with (
        RedisStreamsConnector(url, "orders", lease=1.0) as connector,
        redis.Redis.from_url(url) as client,
    ):
        _, due = run_blocking(connector._perform(connector._queue.next_due()))
        assert 30 < due <= 100, "a worker would sleep until the first is due"
        age(client, "orders", 30)
        assert connector.fetch_transactions(10) == []
        assert connector.counts() == {"ready": 0, "leased": 0, "delayed": 2, "dead": 0}
        age(client, "orders", 71)
        assert [each.id for each in connector.fetch_transactions(10)] == ["t1"]
        assert [
            each["times_delivered"] for each in client.xpending_range("orders", "onceward", "-", "+", 9)
        ] == [1, 1]
        age(client, "orders", 100)
        again = connector.fetch_transactions(10)
        assert sorted(each.id for each in again) == ["t0", "t1"]


@pytest.mark.req("CN-12")
def test_what_is_due_is_served_oldest_first_whoever_had_it(
    redis_url: str, stream: str, client: redis.Redis
) -> None:
    with RedisStreamsConnector(redis_url, stream) as one, RedisStreamsConnector(redis_url, stream) as two:
        one.dispatch_transactions(numbered(6))
        for holder in (one, two, one):
            _lost, later = holder.fetch_transactions(2)
            holder.settle_transactions([Settlement(later, Verdict.RETURNED, delay=61.0)])
        age(client, stream, 62)
        fetched = two.fetch_transactions(4) + two.fetch_transactions(4)
        assert [each.id for each in fetched] == [f"t{number}" for number in range(6)]


def test_counts_say_where_messages_are(redis_url: str, stream: str) -> None:
    with RedisStreamsConnector(redis_url, stream, redelivery_delay=30) as connector:
        connector.dispatch_transactions(numbered(6))
        first, second, third, _ = connector.fetch_transactions(4)
        error = TransactionException("later")
        connector.settle_transactions(
            [
                Settlement(first, Verdict.DONE),
                Settlement(second, Verdict.FAILED, error),
                Settlement(third, Verdict.FAILED, TransactionException("no", "BUSINESS")),
            ]
        )
        assert connector.counts() == {"ready": 2, "leased": 1, "delayed": 1, "dead": 1}


# ── streams, groups and clients ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("busy", [True, False])
def test_a_stream_deleted_while_consuming_is_made_again(
    redis_url: str, stream: str, client: redis.Redis, busy: bool
) -> None:
    with RedisStreamsConnector(redis_url, stream) as connector:
        connector.dispatch_transactions(numbered(1))
        assert len(connector.fetch_transactions(1 if busy else 10)) == 1
        client.delete(stream)
        assert connector.fetch_transactions(1) == []
        connector.dispatch_transactions(numbered(1))
        assert len(connector.fetch_transactions(1)) == 1


@pytest.mark.parametrize("verdict", list(Verdict))
def test_an_outcome_of_a_deleted_stream_is_nobodys_and_no_error(
    redis_url: str, stream: str, client: redis.Redis, verdict: Verdict
) -> None:
    with RedisStreamsConnector(redis_url, stream) as connector:
        connector.dispatch_transactions(numbered(2))
        first, second = connector.fetch_transactions(2)
        client.delete(stream)
        connector.extend_transactions([second])
        connector.settle_transactions([Settlement(first, verdict)])
        connector.settle_transactions([Settlement(first, verdict)])
        assert connector.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}


def test_many_connectors_that_start_at_once_make_one_group(redis_url: str, stream: str) -> None:
    connectors = [RedisStreamsConnector(redis_url, stream) for _ in range(8)]
    threads = [threading.Thread(target=each.fetch_transactions, args=(1,)) for each in connectors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connectors[0].dispatch_transactions(numbered(8))
    taken = [each.id for connector in connectors for each in connector.fetch_transactions(3)]
    assert sorted(taken) == [f"t{number}" for number in range(8)]
    for connector in connectors:
        connector.close()


@pytest.mark.parametrize("decoded", [True, False])
def test_any_client_will_do_and_stays_as_it_was(redis_url: str, stream: str, decoded: bool) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=decoded) as given:
        with RedisStreamsConnector(given, stream) as connector:
            connector.dispatch_transactions([Transaction(id="t0", payload=b"\xff")])
            [fetched] = connector.fetch_transactions(1)
            assert fetched.payload == b"\xff"
        assert given.set(stream + ":still-mine", "x")
        assert isinstance(given.get(stream + ":still-mine"), str if decoded else bytes)


def test_a_client_of_the_other_kind_is_refused(redis_url: str) -> None:
    with pytest.raises(ConfigurationError, match="redis URL"):
        RedisStreamsConnector(redis.asyncio.Redis.from_url(redis_url), "orders")
    with pytest.raises(ConfigurationError, match="redis URL"):
        AsyncRedisStreamsConnector(redis.Redis.from_url(redis_url), "orders")


@pytest.mark.parametrize("settings", [{"stream": ""}, {"group": ""}, {"maxlen": 0}, {"lease": 0}])
def test_settings_that_cannot_work_are_refused_by_name(redis_url: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        RedisStreamsConnector(redis_url, **{"stream": "orders", **settings})


def test_maxlen_trims_what_is_dispatched(redis_url: str, stream: str, client: redis.Redis) -> None:
    with RedisStreamsConnector(redis_url, stream, maxlen=100) as connector:
        for _ in range(20):
            connector.dispatch_transactions(numbered(100))
    assert client.xlen(stream) < 1000


def test_a_cancelled_fetch_gives_back_what_it_took(redis_url: str, stream: str) -> None:
    async def main() -> int:
        async with AsyncRedisStreamsConnector(redis_url, stream) as connector:
            await connector.dispatch_transactions_async(numbered(5))
            for _ in range(20):
                fetching = asyncio.create_task(connector.fetch_transactions_async(5))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                fetching.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await fetching
            return len(await connector.fetch_transactions_async(5))

    assert asyncio.run(main()) == 5


def test_a_fetch_that_is_cancelled_while_redis_is_silent_is_cancelled(link: Proxy, stream: str) -> None:
    async def main() -> None:
        client = redis.asyncio.Redis.from_url(link.url, socket_timeout=2)
        async with AsyncRedisStreamsConnector(client, stream) as connector:
            await connector.dispatch_transactions_async(numbered(1))
            link.answers["XREADGROUP"] = b""
            fetching = asyncio.create_task(connector.fetch_transactions_async(5))
            await until_async(lambda: link.seen["XREADGROUP"] or fetching.done())
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            link.answers.clear()
            assert len(await connector.fetch_transactions_async(5)) == 1

    asyncio.run(main())


# ── dispatching together ────────────────────────────────────────────────────────────────────────────────


def appended(client: redis.Redis, stream: str) -> list[str]:
    return [fields[b"id"].decode() for _, fields in client.xrange(stream)]


def scripts_run(client: redis.Redis) -> int:
    stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


def test_what_many_tasks_dispatch_at_once_travels_in_few_round_trips_and_in_order(
    redis_url: str, stream: str, client: redis.Redis
) -> None:
    async def main() -> None:
        async with AsyncRedisStreamsConnector(redis_url, stream) as connector:
            await asyncio.gather(*(connector.dispatch_transactions_async([each]) for each in numbered(250)))

    before = scripts_run(client)
    asyncio.run(main())
    assert appended(client, stream) == [each.id for each in numbered(250)]
    assert scripts_run(client) - before <= 4, "three loads, plus one if Redis has to learn the script"


def test_one_who_is_cancelled_or_refused_does_not_keep_the_others_from_dispatching(
    redis_url: str, stream: str, client: redis.Redis
) -> None:
    async def main() -> list[Any]:
        async with AsyncRedisStreamsConnector(redis_url, stream) as connector:
            calls = [
                asyncio.create_task(connector.dispatch_transactions_async([each])) for each in numbered(3)
            ]
            refused = connector.dispatch_transactions_async([Transaction(id="t3", payload=object())])
            await asyncio.sleep(0)
            calls[0].cancel()
            await connector.dispatch_transactions_async([])
            return await asyncio.gather(*calls, refused, return_exceptions=True)

    cancelled, *sent, refused = asyncio.run(main())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert sent == [None, None]
    assert isinstance(refused, PayloadError)
    assert appended(client, stream) == ["t1", "t2"]  # nobody waited for t0 any more when they were sent


def test_what_is_dispatched_in_one_call_is_appended_in_one_go_however_much_it_is(
    redis_url: str, stream: str, client: redis.Redis
) -> None:
    with RedisStreamsConnector(redis_url, stream) as connector:
        connector.dispatch_transactions(numbered(1))
        before = scripts_run(client)
        connector.dispatch_transactions(numbered(2500))
        assert scripts_run(client) - before == 1
    assert appended(client, stream)[1:] == [each.id for each in numbered(2500)]


@pytest.mark.parametrize("mode", ["threads", "asyncio"])
def test_a_failure_is_everybodys_whose_entries_travelled_together(durable_redis: Server, mode: str) -> None:
    with connect(World(mode), durable_redis.url, "orders") as queue, ThreadPoolExecutor(8) as threads:
        queue.dispatch(*numbered(1))
        durable_redis.kill()
        calls = [threads.submit(queue.dispatch, each) for each in numbered(20)]
        assert all(isinstance(call.exception(), redis.ConnectionError) for call in calls)
        durable_redis.start()
        queue.dispatch(*numbered(1))
        assert len(queue.fetch()) == 2


# ── under the engine ────────────────────────────────────────────────────────────────────────────────────


def test_the_engines_produce_and_consume_on_it(redis_url: str, stream: str, client: redis.Redis) -> None:
    class Send(ProducerTask):
        def produce_transaction(self, transaction: Transaction) -> None:
            self.connectors["out"].dispatch_transactions([transaction])

    seen: list[str] = []
    with RedisStreamsConnector(redis_url, stream) as connector:
        assert Send({"out": connector}).produce_transactions(numbered(250)).succeeded == 250
        task = Collect({"source": connector}, {"seen": seen})
        assert task.consume_transactions(consuming(batch=100, concurrency=8)).succeeded == 250
    assert sorted(seen) == sorted(each.id for each in numbered(250))
    assert client.xpending(stream, "onceward")["pending"] == 0


def test_the_asyncio_engine_consumes_on_it(redis_url: str, stream: str) -> None:
    seen: list[str] = []

    class AsyncCollect(AsyncConsumerTask):
        async def process_transaction(self, transaction: Transaction) -> None:
            seen.append(transaction.id)

    async def main() -> int:
        async with AsyncRedisStreamsConnector(redis_url, stream) as connector:
            await connector.dispatch_transactions_async(numbered(250))
            report = await AsyncCollect({"source": connector}).consume_transactions(
                consuming(batch=100, concurrency=32, mode="continuous")
            )
            return report.succeeded

    assert asyncio.run(main()) == 250
    assert len(set(seen)) == 250


# ── lost connections, and no work ───────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["threads", "asyncio"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


@pytest.fixture
def durable_redis() -> Iterator[Server]:
    with redis_server(durable=True) as server:
        yield server


@pytest.fixture
def forgetful_redis() -> Iterator[Server]:
    with redis_server() as server:
        yield server


@pytest.fixture
def link(redis_url: str) -> Iterator[Proxy]:
    with proxy(redis_url) as made:
        yield made


def connect(world: World, url: Any, stream: str, **settings: Any) -> ConnectorDriver:
    kind: Any = AsyncRedisStreamsConnector if world.asynchronous else RedisStreamsConnector
    return ConnectorDriver(kind(url, stream, **settings))


def consume_on(
    world: World,
    url: str,
    stream: str,
    policy: Any,
    process: Callable[[Any, Transaction], Any],
    **settings: Any,
) -> Report:
    """One call of the engine, on a connector that is closed in the same event loop."""

    def make(connector: Any) -> Any:
        task = world.consumer(lambda transaction: process(task, transaction), source=connector)
        return task

    async def main() -> Report:
        async with AsyncRedisStreamsConnector(url, stream, **settings) as connector:
            report: Report = await make(connector).consume_transactions(policy)
            return report

    if world.asynchronous:
        return asyncio.run(main())
    with RedisStreamsConnector(url, stream, **settings) as connector:
        report: Report = make(connector).consume_transactions(policy)
        return report


def test_a_lost_connection_surfaces_as_a_fetch_exception(durable_redis: Server, world: World) -> None:
    durable_redis.kill()
    with pytest.raises(FetchException) as raised:
        consume_on(world, durable_redis.url, "orders", consuming(), lambda *_: None)
    assert isinstance(raised.value.cause, redis.ConnectionError)


def test_the_loop_works_again_after_redis_returns_when_the_policy_allows_it(
    durable_redis: Server, world: World
) -> None:
    seen: list[str] = []
    returning = threading.Timer(0.5, durable_redis.start)

    def process(task: Any, transaction: Transaction) -> None:
        seen.append(transaction.id)
        if len(seen) == 50:
            durable_redis.kill()
            returning.start()
        if len(set(seen)) == 300:
            task.stop()

    policy = consuming(
        batch=20,
        fetch=retry(200, backoff=0.05, backoff_multiplier=1),
        streaming=True,
        timeout=60,
        empty_queue={"backoff": 0.05, "backoff_cap": 0.2},
    )
    with RedisStreamsConnector(durable_redis.url, "orders") as connector:
        connector.dispatch_transactions(numbered(300))
        report = consume_on(world, durable_redis.url, "orders", policy, process, lease=2.0)
        returning.join()
        assert report.stop_reason == "stopped"
        assert report.retries > 0
        assert set(seen) == {each.id for each in numbered(300)}
        assert connector.counts()["dead"] == 0


def test_redis_restarted_under_load_loses_nothing_between_the_engines(
    durable_redis: Server, world: World
) -> None:
    """Producer and consumer engines run while Redis is killed again and again: every confirmed entry is consumed."""
    ids = {each.id for each in numbered(600)}
    seen: set[str] = set()
    sent: set[str] = set()
    url = durable_redis.url

    def produce() -> None:
        with connect(world, url, "orders") as queue:
            for each in numbered(len(ids)):
                while each.id not in sent:
                    try:
                        queue.dispatch(each)
                        sent.add(each.id)
                    except redis.ConnectionError:
                        time.sleep(0.01)

    def restart() -> None:
        for part in (1, 2, 3):
            until(lambda part=part: len(sent) >= len(ids) * part // 4)
            durable_redis.kill()
            durable_redis.start()

    def process(task: Any, transaction: Transaction) -> None:
        seen.add(transaction.id)
        if seen == ids:
            task.stop()

    policy = consuming(
        batch=20,
        concurrency=4,
        fetch=retry(1000, backoff=0.02, backoff_multiplier=1),
        streaming=True,
        timeout=100,
        empty_queue={"backoff": 0.02, "backoff_cap": 0.2},
    )
    others = [threading.Thread(target=produce), threading.Thread(target=restart)]
    for thread in others:
        thread.start()
    report = consume_on(world, url, "orders", policy, process, lease=1.0, max_deliveries=50)
    for thread in others:
        thread.join()
    assert report.stop_reason == "stopped"
    assert seen == sent == ids
    with RedisStreamsConnector(url, "orders") as connector:
        assert connector.counts()["dead"] == 0


def test_a_user_who_may_not_create_groups_uses_an_existing_one(
    redis_url: str, stream: str, client: redis.Redis
) -> None:
    user = f"user-{stream}"
    keys = (f"~{stream}", f"~{{{stream}}}:*")
    groups = ("+@connection", "+@scripting", "+@stream", "+@hash", "+@sortedset", "+@list")
    client.execute_command(
        "ACL", "SETUSER", user, "on", ">secret", *keys, *groups, "+exists", "+del", "+time"
    )
    client.execute_command("ACL", "SETUSER", user, "-xgroup")
    url = redis_url.replace("redis://", f"redis://{user.replace(':', '%3A')}:secret@")
    try:
        with RedisStreamsConnector(url, stream) as connector:
            connector.dispatch_transactions(numbered(1))
            with pytest.raises(redis.exceptions.NoPermissionError):
                connector.fetch_transactions(1)
            client.xgroup_create(stream, "onceward", "0")
            assert len(connector.fetch_transactions(1)) == 1
            assert connector.release_owner(connector.owner) == 1
        client.execute_command("ACL", "SETUSER", user, "-xinfo")
        denied = pytest.raises(redis.exceptions.NoPermissionError, match="needs XINFO")
        with RedisStreamsConnector(url, stream) as connector, denied:
            connector.fetch_transactions(1)
    finally:
        client.acl_deluser(user)


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Log lines about missing streams and groups since the last call."""
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    caplog.clear()
    return said


@pytest.mark.parametrize("rebuilt", [True, False], ids=["rebuilt", "same"])
def test_a_redis_that_restarted_empty_is_reported_once_with_what_is_lost(
    forgetful_redis: Server, world: World, caplog: pytest.LogCaptureFixture, rebuilt: bool
) -> None:
    """Whether the connector was kept, or is a new one, as the runner creates it after an outage."""
    url = forgetful_redis.url
    with connect(world, url, "orders") as before:
        before.dispatch(*numbered(5))
        assert len(before.fetch(1)) == 1
        assert losses(caplog) == [], "a first start logs nothing"
        forgetful_redis.kill()
        with pytest.raises(redis.ConnectionError):
            before.fetch()
        forgetful_redis.start()
        with connect(world, url, "orders") as new:
            after = new if rebuilt else before
            assert after.fetch() == []
            [said] = losses(caplog)
            assert "stream orders with group onceward has disappeared" in said
            assert "Messages that waited in the stream are lost" in said
            after.dispatch(*numbered(1))
            assert len(after.fetch()) == 1
            assert losses(caplog) == []


def test_what_producers_sent_before_the_consumer_is_back_does_not_hide_the_loss(
    forgetful_redis: Server, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(world, forgetful_redis.url, "orders") as before:
        before.dispatch(*numbered(5))
        before.fetch(1)
    forgetful_redis.kill()
    forgetful_redis.start()
    with connect(world, forgetful_redis.url, "orders") as after:
        after.dispatch(*numbered(2))
        assert len(after.fetch()) == 2
        assert len(losses(caplog)) == 1


def test_another_stream_group_or_database_is_a_first_start(
    redis_url: str, stream: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    other_database = redis_url.removesuffix("/0") + "/1"
    for url, name, settings in (
        (redis_url, stream, {}),
        (redis_url, stream, {"group": "mailing"}),
        (redis_url, f"{stream}:other", {}),
        (other_database, stream, {}),
        (redis_url, stream, {}),
    ):
        with connect(world, url, name, **settings) as queue:
            assert queue.fetch() == []
    assert losses(caplog) == []


def test_what_was_appended_is_not_appended_again_when_the_answer_is_lost(
    world: World, link: Proxy, stream: str, client: redis.Redis
) -> None:
    with connect(world, link.url, stream) as queue:
        queue.dispatch(*numbered(1))
        link.mute = True
        with pytest.raises(redis.ConnectionError):
            queue.dispatch(*numbered(1))
        link.mute = False
        assert client.xlen(stream) == 2, "it was sent once: the caller decides whether to send it again"
        queue.dispatch(*numbered(1))
        assert client.xlen(stream) == 3


def test_an_answer_that_does_not_come_is_an_error_after_the_clients_own_time_out(
    world: World, link: Proxy, stream: str
) -> None:
    kind: Any = redis.asyncio.Redis if world.asynchronous else redis.Redis
    with connect(world, kind.from_url(link.url, socket_timeout=2), stream) as queue:
        queue.dispatch(*numbered(2))
        link.answers["XREADGROUP"] = b""
        with pytest.raises(redis.TimeoutError):
            queue.fetch()
        link.answers.clear()
        assert len(queue.fetch()) == 2


def test_a_connection_that_was_closed_in_a_pause_is_replaced_before_anything_is_sent(
    world: World, redis_url: str, stream: str, client: redis.Redis
) -> None:
    kind: Any = redis.asyncio.Redis if world.asynchronous else redis.Redis
    with connect(world, kind.from_url(redis_url, client_name=stream), stream) as queue:
        queue.dispatch(*numbered(2))
        assert len(queue.fetch()) == 2
        for each in client.client_list():
            if each["name"] == stream:
                client.client_kill_filter(_id=each["id"])
        if world.asynchronous:  # an event loop has to notice it
            until(lambda: all(each._reader.at_eof() for each in queue.connector._wire._free))
        queue.dispatch(*numbered(1))
        assert len(queue.fetch()) == 1


def test_an_idle_engine_costs_under_ten_commands_a_second_and_no_cpu(
    world: World, redis_url: str, stream: str, client: redis.Redis
) -> None:
    cost: dict[str, float] = {}

    def measure(task: Any) -> None:
        time.sleep(1)  # let it notice that the source is empty
        began, cpu, before = time.monotonic(), time.process_time(), commands(client)
        time.sleep(3)
        cost["commands"] = commands(client) - before
        cost["cpu"] = time.process_time() - cpu
        cost["seconds"] = time.monotonic() - began
        task.stop()

    measuring: list[threading.Thread] = []

    def process(task: Any, transaction: Transaction) -> None:
        measuring.append(threading.Thread(target=measure, args=(task,)))
        measuring[0].start()

    with RedisStreamsConnector(redis_url, stream) as connector:
        connector.dispatch_transactions(numbered(1))
    consume_on(world, redis_url, stream, consuming(concurrency=32, streaming=True), process)
    measuring[0].join()
    assert cost["commands"] / cost["seconds"] < 10
    assert cost["cpu"] / cost["seconds"] < 0.1


def commands(client: redis.Redis) -> int:
    count: int = client.info("stats")["total_commands_processed"]
    return count

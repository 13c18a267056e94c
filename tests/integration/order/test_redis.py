"""Order on a Redis stream: what others do to the stream and its group, and what waits is kept where."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest
import redis

from onceward._sync import run_blocking
from onceward.connectors.lease_rules import BurialReason
from onceward.connectors.redis_streams import AsyncRedisStreamsConnector, RedisStreamsConnector, lines
from onceward.connectors.redis_streams.counts import read_backlog
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.transaction import Settlement, Transaction, Verdict
from tests.support.every_redis import every_redis
from tests.support.lines import end, fetch, key_of, send
from tests.support.pending_entries import age
from tests.support.wait import LIMIT, until

pytestmark = every_redis

REFUSED = TransactionException("no", ExceptionCategory.BUSINESS)
Open = Callable[..., Any]


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, protocol=2) as made:
        yield made


@pytest.fixture
def stream() -> str:
    return f"order:{uuid4().hex}"


@pytest.fixture
def open_(redis_url: str, stream: str) -> Iterator[Open]:
    with ExitStack() as opened:

        def make(*, ordered: bool = True, hold_dead: bool = True, user: str = "", **settings: Any) -> Any:
            url = redis_url.replace("redis://", f"redis://{user}:secret@") if user else redis_url
            connector = opened.enter_context(RedisStreamsConnector(url, stream, **settings))
            if ordered:
                connector.keep_order(key_of, hold_dead=hold_dead)
            return connector

        yield make


def entries(client: redis.Redis, stream: str) -> dict[str, bytes]:
    """The entry of each name that was sent, in the order of the stream."""
    found = [entry for entry, _ in client.xrange(stream)]
    return dict(zip([f"a{number}" for number in range(1, len(found) + 1)], found, strict=True))


def look_again(connector: Any) -> None:
    """Let the next fetch look for what others left, as it does every second."""
    connector._queue._recover_at = 0.0


# ── what others do ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("OR-07")
def test_a_line_goes_on_when_another_program_acknowledges_its_first(
    open_: Open, client: redis.Redis, stream: str
) -> None:
    one = open_()
    send(one, "a1", "a2")
    assert list(fetch(one)) == ["a1"]
    client.xack(stream, "onceward", entries(client, stream)["a1"])
    look_again(one)
    assert list(fetch(one)) == ["a2"]


@pytest.mark.req("OR-07")
def test_what_was_taken_without_order_comes_before_what_is_new(
    open_: Open, client: redis.Redis, stream: str
) -> None:
    plain = open_(ordered=False)
    send(plain, "a1", "b1")
    fetch(plain)
    send(plain, "a2", "c1")
    one = open_()
    assert list(fetch(one)) == ["c1"]
    age(client, stream, 61)
    again = fetch(one)
    assert sorted(again) == ["a1", "b1", "c1"]
    end(one, Verdict.DONE, again["a1"])
    assert list(fetch(one)) == ["a2"]


@pytest.mark.req("OR-07")
def test_without_order_by_again_what_waits_is_delivered(
    open_: Open, client: redis.Redis, stream: str
) -> None:
    send(one := open_(), "a1", "a2", "a3")
    assert list(fetch(one)) == ["a1"]
    age(client, stream, 61)
    assert list(fetch(open_(ordered=False))) == ["a1", "a2", "a3"]


@pytest.mark.req("OR-08")
def test_a_consumer_without_order_by_gets_what_waits_after_a_lease(
    open_: Open, client: redis.Redis, stream: str
) -> None:
    """While processes with and without it run side by side, the first of the line may still be running."""
    one, plain = open_(), open_(ordered=False)
    send(one, "a1", "a2")
    assert list(fetch(one)) == ["a1"]
    assert not fetch(one)
    look_again(plain)
    assert not fetch(plain)
    assert not plain.await_transactions(0.05)
    age(client, stream, 61)
    assert list(fetch(plain)) == ["a1", "a2"]


@pytest.fixture(params=["+xgroup", "-xgroup"])
def user(request: pytest.FixtureRequest, client: redis.Redis, stream: str) -> Iterator[str]:
    """One that may, or may not, create groups and move them."""
    name = stream.replace(":", "-")
    client.execute_command("ACL", "SETUSER", name, "on", ">secret", "~*", "+@all", request.param)
    client.xgroup_create(stream, "onceward", "0", mkstream=True)
    yield name
    client.acl_deluser(name)


@pytest.mark.req("OR-07")
@pytest.mark.parametrize("removed", ["a1", "a2", "a3", "a4"])
def test_an_entry_that_is_removed_after_it_was_read_leaves_no_gap(
    open_: Open, client: redis.Redis, stream: str, removed: str, user: str
) -> None:
    one = open_(user=user)
    send(one, "a1", "a2", "a3", "a4", "a5")

    def remove_and_find(transaction: Transaction) -> str | None:
        client.xdel(stream, sent[removed])
        return key_of(transaction)

    sent = entries(client, stream)
    one.keep_order(remove_and_find, hold_dead=True)
    done: list[str] = []
    while found := fetch(one):
        done += found
        end(one, Verdict.DONE, *found.values())
    assert done == [name for name in sent if name != removed]


@pytest.mark.req("OR-07")
def test_lines_end_with_their_group(open_: Open, client: redis.Redis, stream: str) -> None:
    one = open_()
    send(one, "a1", "a2")
    assert list(fetch(one)) == ["a1"]
    client.xgroup_destroy(stream, "onceward")
    again = until(lambda: fetch(one))
    assert list(again) == ["a1"]
    end(one, Verdict.DONE, again["a1"])
    assert list(fetch(one)) == ["a2"]


@pytest.mark.req("OR-07")
def test_a_group_that_another_program_creates_again_delivers_in_order(
    open_: Open, client: redis.Redis, stream: str
) -> None:
    one = open_()
    send(one, "a1", "a2")
    assert list(fetch(one)) == ["a1"]
    client.xgroup_destroy(stream, "onceward")
    client.xgroup_create(stream, "onceward", "0")
    one._queue.note_arrival()  # so it reads before it looks for what others left
    again = fetch(one)
    assert list(again) == ["a1"]
    end(one, Verdict.DONE, again["a1"])
    assert list(fetch(one)) == ["a2"]


@pytest.mark.req("OR-07")
def test_an_outcome_of_a_group_that_is_gone_does_not_fail(
    open_: Open, client: redis.Redis, stream: str
) -> None:
    one = open_()
    send(one, "a1", "a2")
    first = fetch(one)["a1"]
    client.xgroup_destroy(stream, "onceward")
    end(one, Verdict.DONE, first)
    assert list(until(lambda: fetch(one))) == ["a1"]


# ── dead letters ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("OR-07")
def test_a_trimmed_event_that_waits_becomes_a_letter_at_its_turn(
    open_: Open, client: redis.Redis, stream: str
) -> None:
    one = open_()
    send(one, "a1", "a2", "a3")
    first = fetch(one)["a1"]
    client.xdel(stream, entries(client, stream)["a2"])
    end(one, Verdict.DONE, first)
    assert fetch(one) == {}
    [letter] = one.dead_letters()
    assert letter.reason == BurialReason.TRIMMED
    one.forget_dead([letter.key])
    assert list(fetch(one)) == ["a3"]


@pytest.mark.req("OR-07")
def test_an_event_that_is_trimmed_while_a_process_takes_it_becomes_a_letter(
    open_: Open, client: redis.Redis, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body of an event that another process has lined up is read when the event is taken already."""
    one, two = open_(), open_()
    send(one, "a1", "a2", "a3")
    end(one, Verdict.DONE, fetch(one)["a1"])
    find_bodies = lines.StreamLines._find_bodies

    def remove_and_find(self: Any, served: Any) -> Any:
        client.xdel(stream, sent["a2"])
        return find_bodies(self, served)

    sent = entries(client, stream)
    monkeypatch.setattr(lines.StreamLines, "_find_bodies", remove_and_find)
    assert fetch(two) == {}
    [letter] = two.dead_letters()
    assert letter.reason == BurialReason.TRIMMED
    two.forget_dead([letter.key])
    assert list(fetch(two)) == ["a3"]


@pytest.mark.req("OR-07")
def test_a_letter_that_another_program_removes_releases_its_key(open_: Open, client: redis.Redis) -> None:
    one = open_()
    send(one, "a1", "a2")
    end(one, Verdict.FAILED, fetch(one)["a1"], error=REFUSED)
    assert fetch(one) == {}
    client.delete(one._queue.dead)
    look_again(one)
    assert list(fetch(one)) == ["a2"]


@pytest.mark.req("OR-03")
def test_a_letter_that_is_done_elsewhere_releases_its_key(open_: Open) -> None:
    one = open_()
    send(one, "a1", "a2")
    end(one, Verdict.FAILED, fetch(one)["a1"], error=REFUSED)
    one.acknowledge_dead([each.key for each in one.dead_letters()])
    assert list(fetch(one)) == ["a2"]


@pytest.mark.req("OR-07")
def test_a_letter_holds_its_key_also_in_a_new_group(open_: Open, client: redis.Redis, stream: str) -> None:
    one = open_()
    send(one, "a1", "b1")
    end(one, Verdict.FAILED, fetch(one)["a1"], error=REFUSED)
    client.xgroup_destroy(stream, "onceward")
    client.xdel(stream, entries(client, stream)["a1"])
    send(one, "a2")
    assert list(until(lambda: fetch(one))) == ["b1"]


# ── those that wait ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("OR-07")
def test_waiting_spends_no_delivery(open_: Open, client: redis.Redis, stream: str) -> None:
    one = open_()
    send(one, "a1", "a2")
    first = fetch(one)["a1"]
    age(client, stream, 600)
    end(one, Verdict.DONE, first)
    assert list(fetch(one)) == ["a2"]
    [pending] = client.xpending_range(stream, "onceward", "-", "+", 10)
    assert pending["times_delivered"] == 1


@pytest.mark.req("CN-12")
def test_the_first_of_a_key_may_be_delayed_for_longer_than_the_lease(
    open_: Open, client: redis.Redis, stream: str
) -> None:
    one = open_(lease=60.0)
    send(one, "a1", "a2", "b1")
    end(one, Verdict.RETURNED, fetch(one)["a1"], delay=90.0)
    age(client, stream, 80)
    look_again(one)
    assert list(fetch(one)) == ["b1"], "only its lease is over"
    assert one.counts() == {"ready": 0, "leased": 1, "delayed": 2, "dead": 0}
    _, due = run_blocking(one._perform(one._queue.next_due()))
    assert due <= 10
    age(client, stream, 11)
    look_again(one)
    end(one, Verdict.DONE, fetch(one)["a1"])
    assert list(fetch(one)) == ["a2"]


@pytest.mark.req("OR-07")
def test_what_waits_in_line_counts_as_delayed(open_: Open, redis_url: str, stream: str) -> None:
    one = open_()
    send(one, "a1", "a2", "a3")
    first = fetch(one)["a1"]
    assert one.counts() == {"ready": 0, "leased": 1, "delayed": 2, "dead": 0}
    end(one, Verdict.DONE, first)
    backlog = read_backlog(redis_url, stream, "onceward")
    assert (backlog.in_flight, backlog.delayed) == (0, 2)


@pytest.mark.req("OR-07")
def test_an_idle_process_takes_what_another_has_let_go(open_: Open, client: redis.Redis) -> None:
    """The other one ends right after it has settled."""
    one, two = open_(), open_()
    send(one, "a1", "a2")
    first = fetch(one)["a1"]
    with ThreadPoolExecutor() as threads:
        woken = threads.submit(two.await_transactions, 50.0)
        until(lambda: any(each["cmd"] == "xread" for each in client.client_list()))
        end(one, Verdict.DONE, first)
        assert woken.result(40)
    assert list(fetch(two)) == ["a2"]


@pytest.mark.req("OR-07")
@pytest.mark.parametrize("process", [0, 1])
def test_an_event_that_was_let_go_twice_is_delivered_once(
    open_: Open, client: redis.Redis, stream: str, process: int
) -> None:
    """By the process that has lined it up, and knows its body, and by another."""
    both = open_(), open_()
    send(both[0], "a1", "a2", "b1")
    end(both[0], Verdict.DONE, fetch(both[0])["a1"])
    client.rpush(f"{{{stream}}}:onceward:next", *2 * [entries(client, stream)["a2"]])
    [taken] = both[process].fetch_transactions(5)
    assert taken.payload["name"] == "a2"
    end(both[process], Verdict.DONE, taken)
    assert both[process].fetch_transactions(5) == []


@pytest.mark.req("OR-07")
def test_nothing_is_due_while_all_that_is_left_waits(open_: Open) -> None:
    one = open_()
    send(one, "a1", "a2")
    fetch(one)
    assert not one.await_transactions(0.05)


@pytest.mark.req("OR-01")
def test_a_long_line_does_not_keep_a_fetch_from_those_behind_it(
    open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LONGEST", LIMIT)  # on a busy machine, it would return with what it has
    one = open_()
    send(one, *(f"a{number}" for number in range(3000)), "b1")
    assert list(fetch(one, 2)) == ["a0", "b1"]


@pytest.mark.req("OR-02")
def test_a_lost_event_comes_back_while_there_is_always_more_to_do(open_: Open) -> None:
    one, two = open_(lease=0.3), open_(lease=0.3)
    send(one, "a1")
    fetch(one)

    def is_back() -> bool:
        send(two, "b1", "c1")
        found = fetch(two, 1)
        end(two, Verdict.DONE, *found.values())
        return "a1" in found

    until(is_back)


@pytest.mark.req("OR-01")
def test_keys_that_begin_alike_are_lines_of_their_own(open_: Open) -> None:
    one = open_()
    keys = ["a", "a:", "a:1", "1:a", "ä", "", "a\n"]
    one.dispatch_transactions(
        [Transaction(payload={"key": key, "name": f"{key} {n}"}) for n in (1, 2) for key in keys]
    )
    assert list(fetch(one, 50)) == [f"{key} 1" for key in keys]


@pytest.mark.req("OR-05")
def test_the_first_ids_behind_a_letter_are_known_in_asyncio(redis_url: str, stream: str) -> None:
    async def run() -> Any:
        async with AsyncRedisStreamsConnector(redis_url, stream) as one:
            one.keep_order(key_of, hold_dead=True)
            sent = [Transaction(payload={"key": "a"}) for _ in range(4)]
            await one.dispatch_transactions_async(sent)
            [first] = await one.fetch_transactions_async(5)
            await one.settle_transactions_async([Settlement(first, Verdict.FAILED, REFUSED)])
            return sent, (await one.lines_behind_async(["a", "b"], 2))

    sent, behind = asyncio.run(run())
    assert behind["a"].waiting == 3
    assert behind["b"].waiting == 0
    assert set(behind["a"].ids) <= {each.id for each in sent[1:]}


@pytest.mark.req("OR-01")
def test_a_fetch_of_thousands_lines_up_all_of_them(open_: Open, stream: str, client: redis.Redis) -> None:
    connector = open_()
    send(connector, "a1")
    (first,) = fetch(connector).values()
    send(connector, *(f"b{number}" for number in range(7000)))

    assert list(fetch(connector, 5000)) == ["b0"]
    end(connector, Verdict.DONE, first)
    assert not fetch(connector, 5000)  # the first fetch may have had no time for all
    assert client.xpending(stream, "onceward")["pending"] == 7000
    assert client.zcard(f"{{{stream}}}:onceward:lines") == 7000


@pytest.mark.req("OR-08")
def test_a_fetch_from_redis_does_not_pass_those_in_line(
    open_: Open, stream: str, client: redis.Redis
) -> None:
    def commands_behind(stuck: int) -> int:
        client.delete(*client.keys(f"*{stream}*"), stream)
        connector = open_()
        send(connector, *(f"s{number}" for number in range(stuck)))
        assert list(fetch(connector, 2000)) == ["s0"]
        assert not fetch(connector, 2000)
        send(connector, *(f"{key}{number}" for number in range(20) for key in "abcdefgh"))
        client.config_resetstat()
        for _ in range(10):
            end(connector, Verdict.DONE, *fetch(connector, 8).values())
        calls = client.info("commandstats")
        return sum(each["calls"] for name, each in calls.items() if name.startswith("cmdstat_"))

    few = commands_behind(10)
    assert commands_behind(3000) <= few * 1.1


@pytest.mark.req("OR-08")
def test_those_that_were_let_go_are_taken_together(open_: Open, client: redis.Redis) -> None:
    connector = open_()
    twice = [Transaction(payload={"key": f"k{number % 50}"}) for number in range(100)]
    connector.dispatch_transactions(twice)
    first = connector.fetch_transactions(50)
    assert not connector.fetch_transactions(50)
    end(connector, Verdict.DONE, *first)
    client.config_resetstat()

    assert len(connector.fetch_transactions(50)) == 50
    calls = {name: stats["calls"] for name, stats in client.info("commandstats").items()}
    assert calls["cmdstat_xclaim"] + calls.get("cmdstat_xpending", 0) <= 5


@pytest.mark.req("OR-08")
def test_what_waits_is_not_among_what_is_in_flight(open_: Open, client: redis.Redis, stream: str) -> None:
    """A hash with all that waits behind a stuck key would be slower for the events of every key."""
    connector = open_()
    send(connector, *(f"a{number}" for number in range(1000)), "b1")
    assert list(fetch(connector)) == ["a0", "b1"]
    assert client.hlen(f"{{{stream}}}:onceward:places") == 2


@pytest.mark.req("OR-02")
@pytest.mark.parametrize("suspect", ["a2", "b2"])
def test_a_suspect_that_was_let_go_runs_alone_and_is_not_left_behind(
    open_: Open, client: redis.Redis, stream: str, suspect: str
) -> None:
    connector = open_()
    send(connector, "a1", "b1", "c1", "a2", "b2", "c2")
    first = fetch(connector, 3)
    entry = [each for each, _ in client.xrange(stream)][["a1", "b1", "c1", "a2", "b2", "c2"].index(suspect)]
    assert not fetch(connector, 3)
    client.xclaim(stream, "onceward", "waiting", 0, [entry], idle=0, retrycount=2, justid=True)
    end(connector, Verdict.DONE, *first.values())

    others = [each for each in ("a2", "b2", "c2") if each != suspect]
    batches = [sorted(fetch(connector, 3)) for _ in range(2)]
    assert batches == ([[suspect], others] if suspect == "a2" else [others, [suspect]])

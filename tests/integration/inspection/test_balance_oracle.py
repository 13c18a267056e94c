"""Random histories, with damage, against an oracle: never a false "It holds", never a false alarm."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from onceward.connectors.sqlite import statements
from onceward.testing.servers import nats_server
from tests.support.balance_world import (
    FAILING,
    FLAKY,
    GOOD,
    REFUSED,
    UNREADABLE,
    JetStreamWorld,
    NamedWorld,
    PostgreSqlWorld,
    RedisWorld,
    SqliteWorld,
    World,
    copy_database,
)
from tests.support.every_redis import every_redis
from tests.support.schema import new_schema
from tests.support.wait import until

SEEDS = range(int(os.environ.get("BALANCE_SEEDS", "3")))
FIRST = int(os.environ.get("BALANCE_FIRST", "0"))


@pytest.fixture(scope="module")
def nats_url() -> Iterator[str]:
    with nats_server() as server:
        yield server.url


class History:
    """Does something at random, step by step, and knows what of it was damage."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.random = world, Random(seed)
        self.damaged = False
        """Somebody removed a message: there is reason for an alarm, unless it was a copy."""
        self.lost_letters: set[bytes] = set()
        """By their bytes. A copy that dies makes such a letter again."""
        self.redelivered = False
        """Messages that were done are waiting again."""
        self.rewound = False
        """The source was restored: appends since then never happened, so nobody can miss them."""
        self.steps: list[str] = []

    def step(self, actions: list[tuple[int, Callable[[], Any]]]) -> None:
        weights = [weight for weight, _ in actions]
        [action] = self.random.choices([action for _, action in actions], weights)
        self.steps.append(f"{action.__name__} {action() or ''}")

    def send(self) -> str:
        kind = self.random.choices([GOOD, FLAKY, REFUSED, FAILING, UNREADABLE], [4, 3, 1, 2, 1])[0]
        times = self.random.choice([1, 1, 1, 2, 3])
        self.world.send(kind, times)
        return f"{kind} {times} {self.world.sent[-1].id[-5:]}"

    def copy(self) -> None:
        self.world.send_copy(self.random)

    def conflict(self) -> None:
        self.world.send_conflict(self.random)

    def consume_some(self) -> None:
        self.world.consume(self.random.randint(1, 4))

    def drain(self) -> None:
        self.world.drain()

    def fix(self) -> None:
        self.world.is_fixed = not self.world.is_fixed

    def _letter(self, status: str = "open") -> int | None:
        rows = self.world.ask(f"SELECT id FROM onceward_dead_letters WHERE status = '{status}'")
        return self.random.choice(rows)[0] if rows else None

    def redrive(self) -> None:
        if letter := self._letter():
            self.world.redrive(letter)

    def discard(self) -> None:
        if letter := self._letter():
            self.world.discard(letter)

    def correct(self) -> None:
        if letter := self._letter():
            self.world.correct(letter)

    # ── damage ──────────────────────────────────────────────────────────────────────────────────────────

    def lose_record(self) -> None:
        rows = self.world.ask("SELECT tracking_id FROM onceward_dedup")
        if rows:
            self.world.do(f"DELETE FROM onceward_dedup WHERE tracking_id = '{self.random.choice(rows)[0]}'")

    def lose_letter(self) -> None:
        letter = self._letter(self.random.choice(["open", "redriven", "discarded"]))
        if letter:
            self.lost_letters |= self._digests(f"WHERE id = {letter}")
            self.world.do(f"DELETE FROM onceward_dead_letters WHERE id = {letter}")
            self.damaged = True

    def _digests(self, which: str = "") -> set[bytes]:
        rows = self.world.ask(f"SELECT body_sha256 FROM onceward_dead_letters {which}")
        return {bytes(digest) for (digest,) in rows}

    def restore_database(self) -> None:
        backup = self.world.folder / "backup.db"
        if backup.exists():
            copy_database(backup, self.world.database)
        else:
            copy_database(self.world.database, backup)

    def common(self) -> list[tuple[int, Callable[[], Any]]]:
        return [
            (8, self.send),
            (3, self.copy),
            (1, self.conflict),
            (4, self.consume_some),
            (3, self.drain),
            (1, self.fix),
            (2, self.redrive),
            (1, self.discard),
            (1, self.correct),
        ]

    def harm(self) -> list[tuple[int, Callable[[], Any]]]:
        return [(1, self.lose_record), (1, self.lose_letter), (2, self.restore_database)]

    def check(self) -> str:
        struck = self.world.balance()
        lost = self.world.lost()
        story = "\n".join([*self.steps, f"lost: {sorted(lost)}", repr(struck)])
        assert struck.appended in (None, self.world.appended) or self.rewound, story
        if struck.holds:
            assert self.lost_letters <= self._digests(), story
            assert not lost or self.rewound, story
            assert struck.appended is not None
            parts = (struck.applied, struck.duplicate, struck.pending, struck.dead, struck.gone)
            assert struck.appended == sum(part or 0 for part in parts) + sum(struck.dropped.values()), story
            effects = len(set(self.world.effects()))
            assert struck.applied == effects or (self.redelivered and (struck.applied or 0) < effects), story
        if struck.problems:
            assert lost or self.damaged or set(struck.missing) - self.world.records(), story
        return struck.verdict


class SqliteHistory(History):
    world: SqliteWorld

    def lose_message(self) -> None:
        if self.world.queue.exists():
            pick = "SELECT seq FROM messages ORDER BY seq DESC LIMIT 1"
            self.damaged |= self.world.execute(f"DELETE FROM messages WHERE seq IN ({pick})") > 0

    def restore_queue(self) -> None:
        backup = self.world.folder / "queue_backup.db"
        if backup.exists():
            copy_database(backup, self.world.queue)
            self.rewound = self.redelivered = True
        elif self.world.queue.exists():
            copy_database(self.world.queue, backup)

    def harm(self) -> list[tuple[int, Callable[[], Any]]]:
        return [*super().harm(), (1, self.lose_message), (1, self.restore_queue)]


class NamedHistory(SqliteHistory):
    def harm(self) -> list[tuple[int, Callable[[], Any]]]:
        """Not the backup of both at once: after that the two agree, and nobody can tell."""
        return [(1, self.lose_record), (1, self.lose_letter), (1, self.lose_message)]


class PostgreSqlHistory(History):
    world: PostgreSqlWorld
    is_backed_up = False

    def lose_message(self) -> None:
        if self.world.exists:
            self.damaged |= self.world.lose_newest()

    def restore_queue(self) -> None:
        if self.is_backed_up:
            self.world.restore()
            self.rewound = self.redelivered = True
        elif self.world.exists:
            self.world.back_up()
            self.is_backed_up = True

    def forget(self) -> None:
        if self.world.exists:
            self.world.forget(kept=2)

    def common(self) -> list[tuple[int, Callable[[], Any]]]:
        return [*super().common(), (1, self.forget)]

    def harm(self) -> list[tuple[int, Callable[[], Any]]]:
        return [*super().harm(), (1, self.lose_message), (1, self.restore_queue)]


class RedisHistory(History):
    world: RedisWorld

    def lose_unread(self) -> None:
        if unread := self.world.unread():
            self.world.redis.xdel(self.world.stream, self.random.choice(unread))
            self.damaged = True

    def trim(self) -> None:
        """Remove entries that have ended from the beginning of the stream."""
        if not self.world.redis.exists(self.world.stream):
            return
        ended = set(self.world.ended())
        for entry, _ in self.world.redis.xrange(self.world.stream, count=self.random.randint(1, 5)):
            if entry not in ended:
                break
            self.world.redis.xdel(self.world.stream, entry)

    def trim_all(self) -> None:
        if self.world.redis.exists(self.world.stream):
            self.damaged |= bool(self.world.unread())
            self.world.redis.xtrim(self.world.stream, maxlen=0, approximate=False)

    def delete_stream(self) -> None:
        self.damaged |= bool(self.world.unread())
        self.world.redis.delete(self.world.stream)

    def common(self) -> list[tuple[int, Callable[[], Any]]]:
        return [*super().common(), (2, self.trim)]

    def add_by_hand(self) -> None:
        self.world.send_by_hand()

    def acknowledge_by_hand(self) -> None:
        if self.world.unread() and self.world.has_group():
            self.world.acknowledge_by_hand()
            self.damaged = True

    def destroy_group(self) -> None:
        if self.world.redis.exists(self.world.stream):
            self.world.redis.xgroup_destroy(self.world.stream, "billing")
            self.redelivered = True

    def restore_redis(self) -> None:
        if self.backup:
            self.world.restore(self.backup)
            self.rewound = self.redelivered = True
        else:
            self.backup = self.world.dump()

    backup: dict[bytes, bytes] | None = None

    def harm(self) -> list[tuple[int, Callable[[], Any]]]:
        return [
            *super().harm(),
            (2, self.lose_unread),
            (1, self.trim_all),
            (1, self.delete_stream),
            (1, self.add_by_hand),
            (1, self.acknowledge_by_hand),
            (1, self.destroy_group),
            (1, self.restore_redis),
        ]


class JetStreamHistory(History):
    world: JetStreamWorld

    def lose_unread(self) -> None:
        self.damaged |= self.world.remove_unread()

    def purge_ended(self) -> None:
        self.world.remove_ended()

    def purge_all(self) -> None:
        self.damaged |= bool(self.world.waiting())
        self.world.remove_all()

    def delete_consumer(self) -> None:
        self.world.delete_consumer()
        self.redelivered = True

    def delete_stream(self) -> None:
        self.damaged |= bool(self.world.waiting())
        self.world.delete_stream()
        self.rewound = True

    def harm(self) -> list[tuple[int, Callable[[], Any]]]:
        return [
            *super().harm(),
            (2, self.lose_unread),
            (1, self.purge_ended),
            (1, self.purge_all),
            (1, self.delete_consumer),
            (1, self.delete_stream),
        ]


def live(history: History) -> str:
    """First without damage, then with one, checked after each part."""
    for _ in range(history.random.randint(3, 10)):
        history.step(history.common())
    first = history.check()
    for _ in range(history.random.randint(1, 3)):
        history.step(history.harm())
        history.check()
        for _ in range(history.random.randint(0, 4)):
            history.step(history.common())
        history.check()
    return first


@pytest.mark.usual("0")
@pytest.mark.req("CC-070", "CC-072", "CC-073")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kept", [100_000, 2], ids=["listed", "forgotten"])
def test_a_queue_in_a_file_is_never_misjudged(
    tmp_path: Path, seed: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statements, "KEPT", kept)
    first = live(SqliteHistory(SqliteWorld(tmp_path), FIRST + seed))
    assert first == "holds" or kept == 2


@pytest.mark.usual("0")
@pytest.mark.req("CC-070", "CC-072", "CC-073")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_queue_in_postgresql_is_never_misjudged(tmp_path: Path, postgres_url: str, seed: int) -> None:
    with new_schema(postgres_url) as schema:
        history = PostgreSqlHistory(PostgreSqlWorld(tmp_path, schema), FIRST + seed)
        first = live(history)
    assert first == "holds" or "forget " in history.steps


class JointHistory(PostgreSqlHistory):
    def harm(self) -> list[tuple[int, Callable[[], Any]]]:
        return [
            (1, self.lose_record),
            (1, self.lose_letter),
            (1, self.lose_message),
            (1, self.restore_queue),
        ]


@pytest.mark.req("CC-070", "CC-072", "CC-073")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_queue_in_the_database_of_its_inbox_is_never_misjudged(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, seed: int
) -> None:
    if kind == "sqlite":
        assert live(NamedHistory(NamedWorld(tmp_path), FIRST + seed)) == "holds"
        return
    with new_schema(request.getfixturevalue("postgres_url")) as schema:
        history = JointHistory(PostgreSqlWorld(tmp_path, schema, joint=True), FIRST + seed)
        first = live(history)
    assert first == "holds" or "forget " in history.steps


@pytest.mark.usual("0")
@pytest.mark.req("CC-071", "CC-072", "CC-073")
@every_redis
@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_is_never_misjudged(tmp_path: Path, redis_url: str, seed: int) -> None:
    history = RedisHistory(RedisWorld(tmp_path, redis_url, uuid.uuid4().hex), FIRST + seed)
    first = live(history)
    assert first == "holds" or "trim " in history.steps


@pytest.mark.usual("0")
@pytest.mark.req("CC-072", "CC-073")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_jetstream_is_never_misjudged(tmp_path: Path, nats_url: str, seed: int) -> None:
    history = JetStreamHistory(JetStreamWorld(tmp_path, nats_url, uuid.uuid4().hex), FIRST + seed)
    assert live(history) == "holds"


@pytest.mark.req("CC-121")
@pytest.mark.parametrize("source", ["sqlite", "redis"])
def test_copies_that_several_workers_take_at_once_balance(
    tmp_path: Path, redis_url: str, source: str
) -> None:
    """Of the copies of each message one fails, one succeeds, and the others are duplicates, in any order."""
    in_a_file = source == "sqlite"
    world: World = SqliteWorld(tmp_path) if in_a_file else RedisWorld(tmp_path, redis_url, uuid.uuid4().hex)
    for _ in range(10):
        world.send(FLAKY, times=3)
    world.consume(1)  # creates the tables
    with ThreadPoolExecutor(3) as workers:
        for _ in range(3):
            list(workers.map(lambda _: world.consume(), range(3)))
    until(lambda: world.consume() or not world.waiting())
    struck = world.balance()
    assert struck.holds, repr(struck)
    assert (struck.applied, struck.duplicate, struck.dead) == (10, 20, 0)

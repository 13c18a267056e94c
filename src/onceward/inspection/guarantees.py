"""What a consumer truly guarantees: facts in, verdict out. Nothing here asks anybody anything.

Every rule says of some facts what they are worth. The verdict is that of the weakest rule that applies, because a chain
is as strong as its weakest link.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec


class Strength(IntEnum):
    """From weak to strong."""

    MAY_LOSE = 0
    AT_LEAST_ONCE = 1
    EFFECTS_ONCE = 2
    HOLDS = 3
    """It takes nothing away from the others."""

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one consumer, its source, its database and their settings. None: it was not to be had."""

    name: str = "MODULE:NAME"
    """What `onceward verify` knows it by."""
    source: str
    """sqlite, redis, boundary or memory."""
    synchronous: str = "FULL"
    """Of a queue in SQLite."""
    redis_version: str | None = None
    aof: bool | None = None
    fsync: str | None = None
    """When Redis writes its append-only file to the disk: always, everysec or no."""
    eviction: str | None = None
    """What Redis does when its memory is full."""
    replicas: int | None = None
    maxlen: int | None = None
    mode: str | None = None
    """Of the contract: transactional or effectful; None without one."""
    database: str | None = None
    """sqlite or postgresql; None without one."""
    database_synchronous: str | None = None
    """Of the database: `synchronous` of SQLite, `synchronous_commit` of PostgreSQL, both in upper case."""
    database_fsync: bool | None = None
    """Of PostgreSQL."""
    in_memory: bool = False
    """The database is not in a file."""
    proven: bool | None = None
    """Whether there is evidence for today's code."""
    production: bool = False
    unreachable: tuple[str, ...] = ()
    """What could not be asked, and why."""


class WeakLink(msgspec.Struct, frozen=True):
    """One thing that the guarantee rests on."""

    strength: Strength
    why: str
    advice: str = ""
    """The change that would make it stronger."""


class GuaranteeVerdict(msgspec.Struct, frozen=True):
    guarantee: Strength
    links: tuple[WeakLink, ...]
    """All of them, the weakest first."""
    not_checked: tuple[str, ...]

    @property
    def weakest(self) -> WeakLink:
        return self.links[0]


class Rule(NamedTuple):
    applies: Callable[[Facts], Any]
    strength: Strength
    why: str
    """May name facts, as in {redis_version}."""
    advice: str = ""


def judge(facts: Facts) -> GuaranteeVerdict:
    applied = [rule for rule in RULES if rule.applies(facts)]
    known = msgspec.structs.asdict(facts)
    links = [
        WeakLink(rule.strength, rule.why.format(**known), rule.advice.format(**known)) for rule in applied
    ]
    links.sort(key=lambda link: link.strength)
    return GuaranteeVerdict(links[0].strength, tuple(links), facts.unreachable)


LOSE, AT_LEAST, ONCE, HOLDS = Strength
KEEPS_STREAMS = (None, "noeviction", "volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl")
"""What Redis may do when its memory is full without dropping a stream."""

RULES = (
    # ── what runs the effects
    Rule(
        lambda f: f.mode is None,
        AT_LEAST,
        "there is no contract: a crash after the effect and before the acknowledgement repeats the effect",
        "give the consumer a contract and the app a database, and write through `session`",
    ),
    Rule(
        lambda f: f.mode == "effectful",
        AT_LEAST,
        "calls to the outside happen at least once; each carries a key that never changes, by which the other side can "
        "know a repetition",
        "hand `session.effect`'s key on to the other side, and have it refuse what it has done; or write to the "
        "database only, with mode='transactional'",
    ),
    Rule(
        lambda f: f.mode == "transactional" and f.database == "postgresql",
        ONCE,
        "the inbox's record and the effects are one PostgreSQL transaction",
    ),
    Rule(
        lambda f: f.mode == "transactional" and f.database == "sqlite" and not f.in_memory,
        ONCE,
        "the inbox's record and the effects are one SQLite transaction",
    ),
    Rule(
        lambda f: f.mode is not None and f.proven is False and not f.production,
        ONCE,
        "what does not go through its session is no part of that, and nobody has proven today's code",
        "run `onceward verify {name} --record`",
    ),
    Rule(
        lambda f: f.mode is not None and f.proven is False and f.production,
        ONCE,
        "it does not start at all: its code is unproven, and this is production",
        "run `onceward verify {name} --record`",
    ),
    # ── the database
    Rule(
        lambda f: f.mode is not None and f.in_memory,
        LOSE,
        "the database is in memory: the inbox and all effects are gone with the process",
        "name a file: database='sqlite:///shop.db'",
    ),
    Rule(
        lambda f: f.mode is not None and f.database_fsync is False,
        LOSE,
        "PostgreSQL runs with fsync=off: a power cut may undo effects whose messages are acknowledged, and break the "
        "database",
        "set fsync = on in postgresql.conf",
    ),
    Rule(
        lambda f: f.mode is not None and f.database == "postgresql" and f.database_synchronous == "OFF",
        LOSE,
        "PostgreSQL commits with synchronous_commit=off: a crash of its server may undo the last effects, and their "
        "messages are acknowledged by then",
        "set synchronous_commit = on for this database",
    ),
    Rule(
        lambda f: (
            f.mode is not None and f.database == "sqlite" and f.database_synchronous in ("OFF", "NORMAL")
        ),
        LOSE,
        "the database runs with synchronous={database_synchronous}: a power cut may undo the last effects, and their "
        "messages are acknowledged by then",
        "leave synchronous at FULL",
    ),
    # ── the source
    Rule(
        lambda f: f.source == "memory",
        LOSE,
        "memory:// is gone with the process, and every process has its own",
        "name a source that lasts: sqlite:///orders.db, or redis://host/orders",
    ),
    Rule(
        lambda f: f.source == "sqlite" and f.synchronous in ("FULL", "EXTRA"),
        HOLDS,
        "the queue's file is written through to the disk with every call; kill -9 and a power cut lose nothing",
    ),
    Rule(
        lambda f: f.source == "sqlite" and f.synchronous == "NORMAL",
        LOSE,
        "the queue runs with synchronous=NORMAL: a power cut may undo the last calls; what was sent is lost, what was "
        "acknowledged comes again",
        "leave synchronous out of the source's URL: FULL is the default",
    ),
    Rule(
        lambda f: f.source == "sqlite" and f.synchronous == "OFF",
        LOSE,
        "the queue runs with synchronous=OFF: a power cut may lose messages, and break the file",
        "leave synchronous out of the source's URL: FULL is the default",
    ),
    Rule(
        lambda f: f.source == "redis" and f.aof is False,
        LOSE,
        "Redis {redis_version} keeps no append-only file: acknowledged messages may be lost when it restarts",
        "set appendonly yes and appendfsync always in redis.conf",
    ),
    Rule(
        lambda f: f.source == "redis" and f.aof and f.fsync in ("everysec", "no"),
        LOSE,
        "Redis {redis_version} runs with appendfsync {fsync}: a crash of its machine may lose what it was told last",
        "set appendfsync always in redis.conf",
    ),
    Rule(
        lambda f: f.source == "redis" and f.aof and f.fsync == "always",
        HOLDS,
        "Redis {redis_version} writes every command to its append-only file before it answers",
    ),
    Rule(
        lambda f: f.source == "redis" and f.aof and f.fsync is None,
        HOLDS,
        "Redis {redis_version} has an append-only file; it does not say how often that is written to the disk",
        "see that it runs with appendfsync always",
    ),
    Rule(
        lambda f: f.source == "redis" and f.eviction not in KEEPS_STREAMS,
        LOSE,
        "Redis runs with maxmemory-policy {eviction}: it may drop the whole stream when its memory is full",
        "set maxmemory-policy noeviction",
    ),
    Rule(
        lambda f: f.source == "redis" and f.replicas,
        LOSE,
        "Redis has replicas, and tells them after it has answered: a failover may lose what it was told last",
        "keep what must not be lost in one Redis with appendfsync always, or in a boundary on PostgreSQL",
    ),
    Rule(
        lambda f: f.source == "redis" and f.maxlen is not None,
        LOSE,
        "the stream is trimmed to about {maxlen} entries: what is not read by then is lost, what is in work becomes a "
        "dead letter without its content",
        "leave maxlen out, and trim what is done with XTRIM MINID; or choose one that is never reached",
    ),
    Rule(
        lambda f: f.source == "boundary",
        HOLDS,
        "a boundary answers when a fact is durable in its store; facts are kept for a week or as it is told, and who "
        "is away for longer is told what it missed",
    ),
    Rule(
        lambda f: f.source == "boundary" and f.database is None,
        AT_LEAST,
        "without a database there is no place for dead letters: a fact that keeps failing holds up all after it",
        "give the app a database",
    ),
    Rule(
        lambda f: f.redis_version is not None and _older(f.redis_version, (6, 2)),
        AT_LEAST,
        "Redis {redis_version} is too old: streams are consumed with commands of Redis 6.2",
        "upgrade Redis",
    ),
    # ── delivery
    Rule(
        lambda f: f.source != "memory",
        HOLDS,
        "delivery is at least once: what a killed process had in hand is delivered again",
    ),
)
"""All that is known, and what it is worth."""


def _older(version: str, than: tuple[int, int]) -> bool:
    parts = version.split(".")
    return (int(parts[0]), int(parts[1])) < than

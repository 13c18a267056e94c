"""What a consumer really guarantees: facts in, verdict out. Nothing here queries a server.

Every rule rates some facts. The verdict is the weakest rule that applies, because a chain is only as strong as its
weakest link. A connector reports the facts of its source, but does not rate them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from onceward.connectors.reports import SourceFacts, Survives


class Strength(IntEnum):
    """From weak to strong."""

    MAY_LOSE = 0
    AT_LEAST_ONCE = 1
    EFFECTS_ONCE = 2
    HOLDS = 3
    """Does not weaken the others."""

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one consumer, its source and its database. None if it could not be determined."""

    name: str = "MODULE:NAME"
    """Its name for `onceward verify`."""
    source: SourceFacts
    mode: str | None = None
    """The mode of its contract, transactional or effectful; None without a contract."""
    database: str | None = None
    """sqlite or postgresql; None without one."""
    database_synchronous: str | None = None
    """`synchronous` of SQLite or `synchronous_commit` of PostgreSQL, in upper case."""
    database_fsync: bool | None = None
    """`fsync` of PostgreSQL."""
    connections: int = 0
    """How many connections to the database a run opens at most."""
    max_connections: int | None = None
    """How many PostgreSQL accepts from ordinary users."""
    in_memory: bool = False
    """The database is not in a file."""
    proven: bool | None = None
    """Whether there is evidence for today's code."""
    production: bool = False
    unreachable: tuple[str, ...] = ()
    """What else, apart from the source, could not be reached, and why."""


class WeakLink(msgspec.Struct, frozen=True):
    """One thing that the guarantee depends on."""

    strength: Strength
    why: str
    advice: str = ""
    """The change that would make it stronger."""


class GuaranteeVerdict(msgspec.Struct, frozen=True):
    guarantee: Strength
    links: tuple[WeakLink, ...]
    """All links, weakest first."""
    not_checked: tuple[str, ...]

    @property
    def weakest(self) -> WeakLink:
        return self.links[0]


class Rule(NamedTuple):
    applies: Callable[[Facts], Any]
    strength: Strength
    why: str
    """May name facts, as in {database_synchronous}."""
    advice: str = ""


def judge(facts: Facts) -> GuaranteeVerdict:
    known = msgspec.structs.asdict(facts)
    links = [
        WeakLink(rule.strength, rule.why.format(**known), rule.advice.format(**known))
        for rule in RULES
        if rule.applies(facts)
    ]
    links += _links_of(facts.source)
    links.sort(key=lambda link: link.strength)
    not_checked = (*facts.source.unreachable, *_unknowns_of(facts.source), *facts.unreachable)
    return GuaranteeVerdict(links[0].strength, tuple(links), not_checked)


def _links_of(source: SourceFacts) -> Iterator[WeakLink]:
    if (durability := source.durability) is not None:
        holds = durability.survives in (None, Survives.MACHINE_CRASH)
        yield WeakLink(HOLDS if holds else LOSE, durability.why, durability.advice)
    for hazard in source.hazards:
        yield WeakLink(LOSE if hazard.loses else AT_LEAST, hazard.why, hazard.advice)
    if source.redelivers:
        yield WeakLink(
            HOLDS, "delivery is at least once: what a killed process had in flight is delivered again"
        )
    elif source.redelivers is False and not _loses_everything(source):
        yield WeakLink(
            LOSE,
            "the source does not redeliver: what a killed process had in flight is lost",
            "use a source that redelivers: sqlite:///orders.db, or redis://host/orders",
        )


def _loses_everything(source: SourceFacts) -> bool:
    return source.durability is not None and source.durability.survives is Survives.NOTHING


def _unknowns_of(source: SourceFacts) -> Iterator[str]:
    if source.unreachable:  # it gives the reason
        return
    if source.durability is None:
        yield "how durable the source is: its connector does not report it"
    if source.redelivers is None:
        yield "whether the source redelivers what a killed process had in flight: its connector does not report it"


LOSE, AT_LEAST, ONCE, HOLDS = Strength

RULES = (
    # ── what runs the effects
    Rule(
        lambda f: f.mode is None,
        AT_LEAST,
        "there is no contract: a crash after the effect and before the acknowledgment repeats the effect",
        "give the consumer a contract and the app a database, and write through `session`",
    ),
    Rule(
        lambda f: f.mode == "effectful",
        AT_LEAST,
        "calls to the outside happen at least once; each carries a key that never changes, so the other side can "
        "recognize a repetition",
        "pass the key of `session.effect` to the other side, and have it refuse calls it has already done; or write "
        "only to the database, with mode='transactional'",
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
        "effects outside its session are not part of that, and today's code is unproven",
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
        "the database is in memory: the inbox and all effects are lost with the process",
        "use a file: database='sqlite:///shop.db'",
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
        "PostgreSQL commits with synchronous_commit=off: a crash of its server may undo the last effects after their "
        "messages were acknowledged",
        "set synchronous_commit = on for this database",
    ),
    Rule(
        lambda f: (
            f.mode is not None and f.database == "sqlite" and f.database_synchronous in ("OFF", "NORMAL")
        ),
        LOSE,
        "the database runs with synchronous={database_synchronous}: a power cut may undo the last effects after their "
        "messages were acknowledged",
        "leave synchronous at FULL",
    ),
    Rule(
        lambda f: f.max_connections is not None and f.connections <= f.max_connections,
        HOLDS,
        "all workers together open at most {connections} of the {max_connections} connections that PostgreSQL accepts",
    ),
    Rule(
        lambda f: f.max_connections is not None and f.connections > f.max_connections,
        HOLDS,
        "all workers together want {connections} connections, more than the {max_connections} that PostgreSQL accepts: "
        "`onceward run` opens fewer and work waits, or, if you set pool_size, other clients are refused",
        "set pool_size (connections per process), run fewer processes, or raise max_connections in postgresql.conf",
    ),
    # ── the source, together with the database; `_links_of` has the rest
    Rule(
        lambda f: not f.source.keeps_dead_letters and f.database is None,
        AT_LEAST,
        "without a database there is no place for dead letters: a message that keeps failing blocks all after it",
        "give the app a database",
    ),
)
"""Rates all facts except those that are the source's alone."""

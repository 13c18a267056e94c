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
    UNKNOWN = 1
    """Something could not be determined that might weaken it."""
    AT_LEAST_ONCE = 2
    EFFECTS_ONCE = 3
    HOLDS = 4
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
    record_days: str = ""
    """How long the inbox keeps its records."""
    letter_days: float = 0
    """How long a dead letter can wait for a redrive."""
    key_days: float | None = None
    """How long the other side remembers the keys of its effects, at least. None if an effect does not say so, or no
    effect was made yet."""
    has_effects: bool = True
    """Whether the database knows an effect of it. Before the first, nothing is known about its keys."""
    database: str | None = None
    """sqlite or postgresql; None without one."""
    database_synchronous: str | None = None
    """`synchronous` of SQLite or `synchronous_commit` of PostgreSQL, in upper case."""
    database_fsync: bool | None = None
    """`fsync` of PostgreSQL."""
    commit: str = "each"
    """Whether events that wait together share a commit (`group`), or each has its own."""
    one_commit: bool = False
    """The source is in the database, and acknowledging is part of the handler's transaction."""
    connections: int = 0
    """How many connections to the database a run opens at most."""
    max_connections: int | None = None
    """How many PostgreSQL accepts from ordinary users."""
    in_memory: bool = False
    """The database is not in a file."""
    database_doubts: tuple[WeakLink, ...] = ()
    """What else weakens the database."""
    proven: bool | None = None
    """Whether there is evidence for what runs here."""
    unproven: str = ""
    """Why not."""
    every_type: bool = False
    """It is proven, and its contract accepts every event type."""
    sampled: str = ""
    """The event types that were verified, if it accepts every type. Empty if that was not recorded."""
    says_contract: bool = True
    """Whether the code says which contract it has, even if it says None."""
    production: bool = False
    unreachable: tuple[str, ...] = ()
    """What else, apart from the source, could not be reached, and why."""


class WeakLink(msgspec.Struct, frozen=True):
    """One thing that the guarantee depends on."""

    strength: Strength
    why: str
    advice: str = ""
    """The change that would make it stronger."""
    label: str = ""
    """A word or two for the headline."""


class GuaranteeVerdict(msgspec.Struct, frozen=True):
    links: tuple[WeakLink, ...]
    """All links, weakest first."""

    @property
    def guarantee(self) -> Strength:
        return self.weakest.strength

    @property
    def at_best(self) -> Strength:
        """The guarantee if everything unknown turns out well."""
        known = (link.strength for link in self.links if link.strength is not Strength.UNKNOWN)
        return min(known, default=Strength.UNKNOWN)

    @property
    def headline(self) -> str:
        """The guarantee and what it rests on, in one line."""
        weakest = self.guarantee
        text = f"unknown, at best {self.at_best}" if weakest is Strength.UNKNOWN else str(weakest)
        stops = [link.label for link in self.links if link.label and link.strength is Strength.UNKNOWN]
        if stops and weakest is Strength.UNKNOWN:
            return f"unknown: {', '.join(stops)}"
        rests_on = min(weakest, Strength.EFFECTS_ONCE) if weakest is not Strength.UNKNOWN else self.at_best
        labels = [link.label for link in self.links if link.label and link.strength is rests_on]
        labels += [
            f"but {link.label}"
            for link in self.links
            if link.label and link.strength is Strength.HOLDS and link.advice
        ]
        return f"{text}: {', '.join(dict.fromkeys(labels))}" if labels else text

    @property
    def not_checked(self) -> tuple[str, ...]:
        return tuple(link.why for link in self.links if link.strength is Strength.UNKNOWN)

    @property
    def weakest(self) -> WeakLink:
        return self.links[0]


class Rule(NamedTuple):
    applies: Callable[[Facts], Any]
    strength: Strength
    why: str
    """May name facts, as in {database_synchronous}."""
    advice: str = ""
    label: str = ""


def judge(facts: Facts) -> GuaranteeVerdict:
    known = {**msgspec.structs.asdict(facts), "key_time": _format_days(facts.key_days or 0)}
    links = [
        WeakLink(
            rule.strength, rule.why.format(**known), rule.advice.format(**known), rule.label.format(**known)
        )
        for rule in RULES
        if rule.applies(facts)
    ]
    links += facts.database_doubts if facts.mode is not None else ()
    links += _links_of(facts.source)
    unknowns = (*facts.source.unreachable, *_unknowns_of(facts.source), *facts.unreachable)
    links += [WeakLink(Strength.UNKNOWN, why) for why in unknowns]
    return GuaranteeVerdict(tuple(sorted(links, key=lambda link: link.strength)))


def _format_days(days: float) -> str:
    """`90 days`, `23 hours`, `23 seconds`: in the largest unit of which it is at least one."""
    units = {"day": 1, "hour": 24, "minute": 1440, "second": 86400}
    unit = next((unit for unit, per_day in units.items() if days * per_day >= 1), "second")
    number = f"{days * units[unit]:.3g}"
    return f"{number} {unit}{'' if number == '1' else 's'}"


def _links_of(source: SourceFacts) -> Iterator[WeakLink]:
    if (durability := source.durability) is not None:
        if durability.survives is None:
            strength = Strength.UNKNOWN
        else:
            strength = HOLDS if durability.survives is Survives.MACHINE_CRASH else LOSE
        label = durability.label or ("not durable" if strength is LOSE else "")
        label = label and f"source {label}"
        yield WeakLink(strength, durability.why, durability.advice, label)
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


LOSE, _, AT_LEAST, ONCE, HOLDS = Strength

RULES = (
    # ── what runs the effects
    Rule(
        lambda f: f.mode is None,
        AT_LEAST,
        "there is no contract: a crash after the effect and before the acknowledgment repeats the effect",
        "give the consumer a contract and the app a database, and write through `session`",
        "no contract",
    ),
    Rule(
        lambda f: f.mode == "effectful",
        AT_LEAST,
        "a call that the handler makes with `session.effect` may be repeated until its result is recorded; it gets the "
        "same key each time, by which the other side can recognize a repetition, if the handler sends it",
        "pass the key of `session.effect` to the other side, and have it refuse calls it has already done; or write "
        "only to the database, with mode='transactional'",
        "calls may repeat, with a key",
    ),
    Rule(
        lambda f: f.mode == "effectful" and f.key_days is None and not f.has_effects,
        AT_LEAST,
        "how long the other side remembers keys is unknown until the first effect: this database has none of it yet",
        "say it in the handler: session.effect(…, key_valid_for=hours(23)); explain again when an effect has run",
        "key validity unknown",
    ),
    Rule(
        lambda f: f.mode == "effectful" and f.key_days is None and f.has_effects,
        AT_LEAST,
        "how long the other side remembers the keys of all effects is unknown: a dead letter can wait {letter_days:g} "
        "days, and a redrive after its key was forgotten may repeat the call",
        "say it in the handler: session.effect(…, key_valid_for=hours(23))",
        "key validity unknown",
    ),
    Rule(
        lambda f: f.mode == "effectful" and f.key_days is not None and f.key_days < f.letter_days,
        AT_LEAST,
        "the other side remembers keys for {key_time}, but a dead letter can wait {letter_days:g} days: an effect "
        "in doubt is not called again after that; it is reconciled, or waits for an operator",
        "give session.effect a `reconcile` function if it has none, and redrive dead letters sooner",
        "keys shorter than dead letters wait",
    ),
    Rule(
        lambda f: f.mode == "effectful" and f.key_days is not None and f.key_days >= f.letter_days,
        HOLDS,
        "the other side remembers keys for {key_time}, at least as long as a dead letter can wait",
    ),
    Rule(
        lambda f: f.mode is not None and f.record_days,
        HOLDS,
        "the inbox remembers an event {record_days}; a dead letter can wait {letter_days:g} days",
    ),
    Rule(
        lambda f: f.mode == "transactional" and f.database == "postgresql",
        ONCE,
        "the inbox's record and what the handler writes through its session are one PostgreSQL transaction",
        label="transactional",
    ),
    Rule(
        lambda f: f.mode == "transactional" and f.database == "sqlite" and not f.in_memory,
        ONCE,
        "the inbox's record and what the handler writes through its session are one SQLite transaction",
        label="transactional",
    ),
    Rule(
        lambda f: f.mode is not None and f.commit == "group",
        HOLDS,
        "commit=group: events that wait together share one commit, each in its own savepoint; a crash repeats the "
        "group, and the inbox drops what was done",
    ),
    Rule(
        lambda f: f.mode is not None and f.commit == "batch",
        HOLDS,
        "batches: events that wait together are one call and one commit; one that fails is repeated in halves",
    ),
    Rule(
        lambda f: f.mode == "transactional" and f.commit == "each",
        HOLDS,
        "commit=each: every event has its own commit",
    ),
    Rule(
        lambda f: f.mode == "transactional" and f.one_commit,
        HOLDS,
        "one commit: queue, record, effects and published events",
    ),
    Rule(
        lambda f: f.mode == "effectful" and f.one_commit,
        HOLDS,
        "one commit, after the calls to the outside: queue, record, what the handler writes and published events",
    ),
    Rule(
        lambda f: f.mode is not None and f.proven and not f.every_type,
        ONCE,
        "verification of today's code found no effect outside the session, in the samples that were verified",
        label="proven",
    ),
    Rule(
        lambda f: f.mode is not None and f.proven and f.every_type and f.sampled,
        ONCE,
        "verification of today's code found no effect outside the session, in samples of {sampled}; its contract "
        "accepts every event type, and nothing is known about the others",
        label="proven only for {sampled}",
    ),
    Rule(
        lambda f: f.mode is not None and f.proven and f.every_type and not f.sampled,
        Strength.UNKNOWN,
        "the contract accepts every event type, and its verification does not say which types had a sample",
        "list the event types in the contract, and verify again",
    ),
    Rule(
        lambda f: f.mode is not None and f.proven is False and not f.production,
        AT_LEAST,
        "it is unproven: {unproven}; what it does outside its session and its effects, if anything, may be repeated",
        "run `onceward verify {name} --record`",
        "unproven",
    ),
    Rule(
        lambda f: f.mode is not None and f.proven is False and f.production,
        AT_LEAST,
        "it does not start at all: this is production, and it is unproven: {unproven}",
        "run `onceward verify {name} --record`",
        "unproven",
    ),
    Rule(
        lambda f: f.production and not f.says_contract,
        AT_LEAST,
        "it does not start at all: this is production, and its code says nothing about a contract",
        "give it a contract, or write out contract=None",
    ),
    # ── the database
    Rule(
        lambda f: f.mode is not None and f.in_memory,
        LOSE,
        "the database is in memory: the inbox and all effects are lost with the process",
        "use a file: database='sqlite:///shop.db'",
        "database not durable",
    ),
    Rule(
        lambda f: f.mode is not None and f.database_fsync is False,
        LOSE,
        "PostgreSQL runs with fsync=off: a power cut may undo effects whose messages are acknowledged, and break the "
        "database",
        "set fsync = on in postgresql.conf",
        "database not durable",
    ),
    Rule(
        lambda f: f.mode is not None and f.database == "postgresql" and f.database_synchronous == "OFF",
        LOSE,
        "PostgreSQL commits with synchronous_commit=off: a crash of its server may undo the last effects after their "
        "messages were acknowledged",
        "set synchronous_commit = on for this database",
        "database not durable",
    ),
    Rule(
        lambda f: (
            f.mode is not None and f.database == "sqlite" and f.database_synchronous in ("OFF", "NORMAL")
        ),
        LOSE,
        "the database runs with synchronous={database_synchronous}: a power cut may undo the last effects after their "
        "messages were acknowledged",
        "leave synchronous at FULL",
        "database not durable",
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
        "too few connections",
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

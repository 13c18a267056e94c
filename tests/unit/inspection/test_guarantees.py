"""From facts to a verdict: the weakest link decides, and its fix is named."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from onceward.connectors.boundary.scheme import FACTS, durability_of
from onceward.connectors.redis_streams.durability import describe_server
from onceward.connectors.reports import Durability, Hazard, SourceFacts, Survives
from onceward.connectors.urls import Address
from onceward.inspection.guarantees import RULES, Facts, Strength, WeakLink, judge


def source(url: str) -> dict[str, Any]:
    """The facts of the connector for this URL."""
    return {"source": Address(url).facts()}


def redis(**server: Any) -> dict[str, Any]:
    good = {
        "version": "7.2.4",
        "aof": True,
        "fsync": "always",
        "rests": False,
        "eviction": "noeviction",
        "replicas": 0,
    }
    return {"source": describe_server(**{**good, **server})}


def boundary(survives: str | None) -> dict[str, Any]:
    reported = {"survives": survives, "why": "its store is such", "advice": "set sync_interval"}
    return {"source": msgspec.structs.replace(FACTS, durability=durability_of({"durability": reported}))}


BOUNDARY = boundary("machine_crash")
GOOD: dict[str, Any] = {
    **source("sqlite:///orders.db"),
    "mode": "transactional",
    "database": "postgresql",
    "database_synchronous": "ON",
    "database_fsync": True,
    "proven": True,
}
SQLITE: dict[str, Any] = {
    **GOOD,
    "database": "sqlite",
    "database_synchronous": "FULL",
    "database_fsync": None,
}

VERDICTS: list[tuple[dict[str, Any], dict[str, Any], str, str, str]] = [
    (GOOD, {}, "effects once", "one PostgreSQL transaction", ""),
    (SQLITE, {}, "effects once", "one SQLite transaction", ""),
    (GOOD, redis(), "effects once", "one PostgreSQL transaction", ""),
    (GOOD, BOUNDARY, "effects once", "one PostgreSQL transaction", ""),
    (
        GOOD,
        boundary("process_crash"),
        "may lose",
        "its store is such; facts are kept",
        "set sync_interval",
    ),
    (GOOD, boundary(None), "unknown", "its store is such", "set sync_interval"),
    (GOOD, boundary("of a later version"), "unknown", "its store is such", "set sync_interval"),
    (
        GOOD,
        {"mode": None},
        "at least once",
        "no contract: a crash after the effect",
        "give the consumer a contract",
    ),
    (
        GOOD,
        {"mode": "effectful"},
        "at least once",
        "it gets the same key each time",
        "pass the key of `session.effect`",
    ),
    (
        BOUNDARY,
        {"mode": "transactional"},
        "at least once",
        "a message that keeps failing blocks all after it",
        "database",
    ),
    (GOOD, source("memory://orders"), "may lose", "memory:// is lost with the process", "sqlite:///"),
    (
        GOOD,
        source("sqlite:///orders.db?synchronous=normal"),
        "may lose",
        "a power cut may undo the last calls",
        "FULL is the default",
    ),
    (
        GOOD,
        source("sqlite:///orders.db?synchronous=off"),
        "may lose",
        "synchronous=OFF",
        "FULL is the default",
    ),
    (GOOD, redis(aof=False), "may lose", "Redis 7.2.4 keeps no append-only file", "appendonly yes"),
    (GOOD, redis(fsync="everysec"), "may lose", "appendfsync everysec", "appendfsync always"),
    (GOOD, redis(rests=True), "may lose", "no-appendfsync-on-rewrite yes", "no-appendfsync-on-rewrite no"),
    (GOOD, redis(eviction="allkeys-lru"), "may lose", "maxmemory-policy allkeys-lru", "noeviction"),
    (GOOD, redis(replicas=2), "may lose", "a failover may lose", "appendfsync always"),
    (GOOD, redis(maxlen=1000), "may lose", "trimmed to about 1000 entries", "remove maxlen"),
    (GOOD, redis(expires_in=3600), "may lose", "the stream expires in 3,600 s", "PERSIST"),
    (GOOD, redis(version="6.0.9"), "at least once", "Redis 6.0.9 is too old", "upgrade"),
    (GOOD, {"database_synchronous": "OFF"}, "may lose", "synchronous_commit=off", "synchronous_commit = on"),
    (GOOD, {"database_fsync": False}, "may lose", "fsync=off", "fsync = on"),
    (
        SQLITE,
        {"database_synchronous": "NORMAL"},
        "may lose",
        "synchronous=NORMAL",
        "leave synchronous at FULL",
    ),
    (SQLITE, {"in_memory": True}, "may lose", "the database is in memory", "sqlite:///shop.db"),
]


@pytest.mark.parametrize(("facts", "changes", "guarantee", "why", "advice"), VERDICTS)
def test_the_weakest_link_is_the_verdict_with_its_reason_and_what_would_mend_it(
    facts: dict[str, Any], changes: dict[str, Any], guarantee: str, why: str, advice: str
) -> None:
    verdict = judge(Facts(**{**facts, **changes}))
    assert str(verdict.guarantee) == guarantee
    assert why in verdict.weakest.why
    assert advice in verdict.weakest.advice


def test_links_go_from_weak_to_strong() -> None:
    links = judge(Facts(**source("memory://orders"), mode=None)).links
    assert [link.strength for link in links] == sorted(link.strength for link in links)
    assert len(links) > 1


@pytest.mark.req("CC-075")
def test_unproven_code_is_at_least_once_and_production_refuses_it() -> None:
    reported = judge(
        Facts(**{**GOOD, "proven": False, "unproven": "its code has changed", "name": "shop:charge"})
    )
    assert reported.headline == "at least once: unproven"
    assert "it is unproven: its code has changed" in reported.weakest.why
    assert "verify shop:charge" in reported.weakest.advice
    refused = judge(Facts(**{**GOOD, "proven": False, "production": True}))
    assert refused.headline == "at least once: unproven"
    assert "does not start at all" in refused.weakest.why


EFFECTFUL: dict[str, Any] = {**GOOD, "mode": "effectful", "letter_days": 90.0}


@pytest.mark.req("CC-075")
@pytest.mark.parametrize(
    ("facts", "headline"),
    [
        (GOOD, "effects once: transactional, proven"),
        ({**GOOD, "every_type": True, "sampled": "placed, paid"},
         "effects once: transactional, proven only for placed, paid"),
        ({**GOOD, "every_type": True}, "unknown, at best effects once: transactional"),
        ({**GOOD, "database_doubts": (WeakLink(Strength.UNKNOWN, "it is shut", "", "database cannot be opened"),)},
         "unknown: database cannot be opened"),
        ({**GOOD, "connections": 120, "max_connections": 97},
         "effects once: transactional, proven, but too few connections"),
        ({**GOOD, "mode": None}, "at least once: no contract"),
        (EFFECTFUL, "at least once: calls may repeat, with a key, key validity unknown"),
        ({**EFFECTFUL, "key_days": 1.0},
         "at least once: calls may repeat, with a key, keys shorter than dead letters wait"),
        ({**EFFECTFUL, "key_days": 90.0}, "at least once: calls may repeat, with a key"),
        ({**EFFECTFUL, "key_days": 90.0, "proven": False}, "at least once: calls may repeat, with a key, unproven"),
        ({**GOOD, **redis(fsync="everysec")}, "may lose: source not durable"),
        ({**GOOD, "database_fsync": False, "proven": False}, "may lose: database not durable"),
        ({**GOOD, **redis(fsync=None)}, "unknown, at best effects once: transactional, proven"),
        ({**GOOD, "proven": None, "unreachable": ("PostgreSQL is away",)},
         "unknown, at best effects once: transactional"),
    ],
)  # fmt: skip
def test_the_headline_is_the_weakest_true_statement(facts: dict[str, Any], headline: str) -> None:
    assert judge(Facts(**facts)).headline == headline


def test_an_eviction_that_spares_keys_without_an_end_spares_streams() -> None:
    assert judge(Facts(**{**GOOD, **redis(eviction="volatile-lru")})).guarantee is Strength.EFFECTS_ONCE


def test_what_was_not_to_be_had_is_not_judged_but_said() -> None:
    verdict = judge(
        Facts(
            source=describe_server(unreachable=("Redis is away",)),
            mode="transactional",
            database="postgresql",
            unreachable=("PostgreSQL is away",),
        )
    )
    assert (verdict.guarantee, verdict.at_best) == (Strength.UNKNOWN, Strength.EFFECTS_ONCE)
    assert verdict.not_checked == ("Redis is away", "PostgreSQL is away")


def test_a_redis_that_does_not_say_when_it_writes_is_unknown_with_an_advice() -> None:
    verdict = judge(Facts(**{**GOOD, **redis(fsync=None)}))
    assert verdict.guarantee is Strength.UNKNOWN
    assert any("does not say how often" in link.why and link.advice for link in verdict.links)


@pytest.mark.req("CN-03")
def test_what_a_connector_does_not_say_is_not_judged_but_said() -> None:
    verdict = judge(Facts(**{**GOOD, "source": SourceFacts()}))
    assert (verdict.guarantee, verdict.at_best) == (Strength.UNKNOWN, Strength.EFFECTS_ONCE)
    durable, redelivers = verdict.not_checked
    assert "how durable the source is: its connector does not report it" in durable
    assert "whether the source redelivers" in redelivers
    assert not any("delivery is at least once" in link.why for link in verdict.links)


@pytest.mark.parametrize(
    ("facts", "guarantee", "why"),
    [
        (
            SourceFacts(durability=Durability(Survives.PROCESS_CRASH, "on one disk")),
            "may lose",
            "disk",
        ),
        (SourceFacts(hazards=(Hazard("it forgets after a day", "raise its limit"),)), "may lose", "forgets"),
        (SourceFacts(hazards=(Hazard("it is old", "upgrade it", loses=False),)), "at least once", "is old"),
        (SourceFacts(redelivers=False), "may lose", "does not redeliver"),
    ],
)
def test_facts_are_judged_whatever_source_they_are_of(facts: SourceFacts, guarantee: str, why: str) -> None:
    verdict = judge(Facts(**{**GOOD, "source": facts}))
    assert str(verdict.at_best) == guarantee
    assert any(why in link.why and str(link.strength) == guarantee for link in verdict.links)


def test_a_loss_is_reported_once_where_nothing_survives() -> None:
    links = judge(Facts(**{**GOOD, **source("memory://orders")})).links
    assert [link.why for link in links if link.strength is Strength.MAY_LOSE] == [links[0].why]


def test_every_rule_applies_to_some_facts_above_and_nothing_promises_exactly_once() -> None:
    cases = [Facts(**{**facts, **changes}) for facts, changes, *_ in VERDICTS]
    cases += [
        Facts(**{**GOOD, "proven": False}),
        Facts(**{**GOOD, "proven": False, "production": True}),
        Facts(**{**GOOD, "mode": None, "says_contract": False, "production": True}),
        Facts(**{**GOOD, "connections": 20, "max_connections": 97}),
        Facts(**{**GOOD, "connections": 120, "max_connections": 97}),
        Facts(**{**GOOD, "one_commit": True}),
        Facts(**{**GOOD, "commit": "group"}),
        Facts(**{**GOOD, "commit": "batch"}),
        Facts(**{**EFFECTFUL, "one_commit": True}),
        Facts(**{**GOOD, "every_type": True, "sampled": "placed"}),
        Facts(**{**GOOD, "every_type": True}),
        Facts(**{**EFFECTFUL, "has_effects": False}),
        Facts(**{**EFFECTFUL, "key_days": 1.0}),
        Facts(**{**EFFECTFUL, "key_days": 90.0, "record_days": "for 90 days"}),
    ]
    unused = [rule.why for rule in RULES if not any(rule.applies(case) for case in cases)]
    assert unused == []
    assert not any(re.search("exactly", rule.why + rule.advice) for rule in RULES)


@pytest.mark.req("CC-075")
@pytest.mark.parametrize(
    ("days", "text"),
    [
        (90.0, "90 days"),
        (1.0, "1 day"),
        (23 / 24, "23 hours"),
        (60 / 86400, "1 minute"),
        (23 / 86400, "23 seconds"),
    ],
)
def test_the_validity_of_keys_is_told_in_a_unit_that_fits(days: float, text: str) -> None:
    verdict = judge(Facts(**{**EFFECTFUL, "key_days": days}))
    assert any(f"remembers keys for {text}, " in link.why for link in verdict.links)

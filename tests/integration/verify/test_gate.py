"""The production gate: without evidence for its current code, a consumer does not run."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from onceward.connectors import AsyncMemoryConnector, MemoryConnector
from onceward.db import DbSession
from onceward.inbox import AsyncInbox, Inbox, UnprovenConsumerError
from onceward.inbox.evidence.code_digest import Code, code_of
from onceward.inbox.evidence.evidence import Evidence, record_evidence, terms_of
from onceward.inbox.evidence.proof import lacking
from onceward.inbox.stores import store_of
from onceward.transaction import Transaction
from onceward.verify.children import run_in_child
from tests.support.databases import Database, database  # noqa: F401  a fixture
from tests.verification import consumers
from tests.verification.proofs import GOOD, proof, with_results

EVENT = Transaction(id="order-1", payload={"total": 10}, metadata={"event_type": "order"})
BILLS = "CREATE TABLE bills (id TEXT, total INTEGER)"
MARKS = "CREATE TABLE marks (id TEXT)"


class World:
    """A consumer's database, with an inbox in production."""

    def __init__(self, base: Database, env: str | None = "production") -> None:
        self.base = base
        kind = AsyncInbox if base.asynchronous else Inbox
        self.inbox: Any = kind(base.default, env=env)
        self._await(self.inbox.migrate())
        self._await(self.inbox.register(consumers.Right.contract))
        base.do(BILLS, MARKS)

    @property
    def backend(self) -> str:
        return self.base.plain().dialect.name

    def record(self, found: Evidence) -> None:
        store = store_of(self.base.plain().dialect, lambda: 1_700_000_000.0)
        with self.base.session() as session:
            session.run(record_evidence, store, found)

    def run(self) -> Any:
        if self.base.asynchronous:
            source: Any = AsyncMemoryConnector()
            self.base.run(source.dispatch_transactions_async([EVENT]))
            return self.base.run(
                consumers.AsyncRight({"source": source}, {"inbox": self.inbox}).consume_transactions()
            )
        source = MemoryConnector()
        source.dispatch_transactions([EVENT])
        return consumers.Right({"source": source}, {"inbox": self.inbox}).consume_transactions()

    def process(self, handler: Any) -> Any:
        return self._await(self.inbox.process(consumers.Right.contract, EVENT, handler))

    @property
    def consumer(self) -> Any:
        return consumers.AsyncRight if self.base.asynchronous else consumers.Right

    def _await(self, result: Any) -> Any:
        return self.base.run(result) if self.base.asynchronous else result


@pytest.fixture
def world(database: Database) -> World:  # noqa: F811
    return World(database)


# ── the refusal ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-001")
def test_in_production_a_consumer_without_evidence_is_refused_and_reported_what_to_do(world: World) -> None:
    with pytest.raises(UnprovenConsumerError) as caught:
        world.run()
    name = world.consumer.__qualname__
    assert "'billing' does not run in production: no verification of it is recorded" in str(caught.value)
    assert f"onceward verify tests.verification.consumers:{name} --record" in str(caught.value)
    assert world.base.scalar("SELECT count(*) FROM bills") == 0

    called: list[Any] = []
    with pytest.raises(UnprovenConsumerError, match="no verification of it is recorded"):
        world.process(lambda event, session: called.append(event))
    assert called == []


@pytest.mark.req("CC-001", "CC-030")
def test_in_production_a_consumer_with_evidence_for_its_code_runs(world: World) -> None:
    world.record(proof(world.consumer, backend=world.backend))
    assert world.run().succeeded == 1
    assert world.run().duplicates == 1


@pytest.mark.req("CC-102")
@pytest.mark.parametrize("level", ["serializable", ""])
def test_evidence_is_about_one_isolation_level_on_postgresql(world: World, level: str) -> None:
    world.record(proof(world.consumer, backend=world.backend, isolation=level))
    if world.backend == "sqlite":
        assert world.run().succeeded == 1
        return
    expected = (
        "verified with the isolation level 'serializable' .* have 'read committed' here"
        if level
        else "an earlier onceward, which did not record the isolation level"
    )
    with pytest.raises(UnprovenConsumerError, match=expected):
        world.run()


@pytest.mark.req("CC-102")
def test_python_without_assertions_is_another_python(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = proof()
    flags = SimpleNamespace(optimize=1)
    monkeypatch.setattr(sys, "flags", flags)
    problem = str(lacking(consumers.Right.contract, consumers.Right, [recorded], "sqlite"))
    assert re.search(r"a dependency has changed .*python 3\.\d+ is now 3\.\d+ -O", problem)


@pytest.mark.req("CC-001", "CC-030", "CC-068")
@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"tested": with_results(kills="failed")}, "its verification failed: kills"),
        (
            {"tested": with_results(replay="skipped")},
            "skipped replay, and a partial verification proves nothing",
        ),
        ({"tested": GOOD[:-1]}, "did not include outside-calls"),
        ({"tested": ()}, "did not include clean, every-type, duplicates, "),
        ({"backend": "postgresql"}, "it was verified on postgresql .*, and this is sqlite"),
        ({"event_types": ("refund",)}, "its verification had no event of type order"),
        ({"terms": {}}, "is from an earlier onceward"),
        (
            {"terms": {**terms_of(consumers.Right.contract), "mode": "effectful"}},
            "its contract has changed since it was verified: mode",
        ),
        (
            {"dependencies": {"python": "2.7"}},
            "a dependency has changed .*: onceward .* is new, python 2.7 is now",
        ),
        ({"mechanism": " "}, "without a description of its idempotency mechanism"),
        (
            {"code": Code(("x",), "other", {"x": "1"})},
            r"its code has changed since it was verified \(.*\): tests.verification.consumers is new, x is missing",
        ),
        ({"schema_versions": (7,)}, "schema version 7, but this is 1"),
        ({"subject": "tests.verification.consumers:Other"}, "was of tests.verification.consumers:Other"),
    ],
)
def test_the_refusal_says_what_is_missing(tmp_path: Path, changes: dict[str, Any], missing: str) -> None:
    world = World(Database("sqlite", "threads", f"sqlite:///{tmp_path}/test.db"))
    world.record(proof(**changes))
    with pytest.raises(UnprovenConsumerError, match=missing):
        world.run()
    world.base.close()


def test_the_newest_evidence_for_today_s_code_counts(tmp_path: Path) -> None:
    """A failed run after a passed one is a failure; evidence for other code does not count."""
    found = [proof(tested=with_results(kills="failed")), proof()]
    contract, code = consumers.Right.contract, consumers.Right
    assert "failed: kills" in str(lacking(contract, code, found, "sqlite"))
    assert lacking(contract, code, found[::-1], "sqlite") is None
    other = msgspec.structs.replace(found[0], code=Code((), "other"))
    assert lacking(contract, code, [other, proof()], "sqlite") is None
    elsewhere = proof(backend="postgresql")
    assert lacking(contract, code, [elsewhere, proof()], "sqlite") is None
    assert "it was verified on postgresql" in str(lacking(contract, code, [other, elsewhere], "sqlite"))


@pytest.mark.req("CC-068")
def test_a_contract_for_more_event_types_than_were_proven_is_refused() -> None:
    contract, code = consumers.contract(event_types=["order", "refund"]), consumers.Right
    assert "no event of type refund" in str(lacking(contract, code, [proof()], "sqlite"))
    every = consumers.contract(event_types=["*"])
    assert "accepts every event type, but it was verified for order" in str(
        lacking(every, code, [proof()], "sqlite")
    )
    assert lacking(every, code, [proof(terms=terms_of(every))], "sqlite") is None
    fewer = proof(event_types=("order", "refund"), terms=terms_of(contract))
    assert lacking(consumers.Right.contract, code, [fewer], "sqlite") is None


@pytest.mark.req("CC-001", "CC-068")
def test_the_environment_goes_before_the_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Database("sqlite", "threads", f"sqlite:///{tmp_path}/test.db")
    world = World(base, env=None)
    assert world.run().succeeded == 1, "outside production nothing is checked"
    monkeypatch.setenv("ONCEWARD_ENV", "Production")
    world.inbox = Inbox(base.default)
    with pytest.raises(UnprovenConsumerError):
        world.run()
    world.inbox = Inbox(base.default, env="staging")
    with pytest.raises(UnprovenConsumerError):
        world.run()
    monkeypatch.setenv("ONCEWARD_ENV", "ci")
    world.inbox = Inbox(base.default, env="production")
    assert world.run().duplicates == 1
    base.close()


@pytest.mark.req("CC-001")
def test_a_handler_of_process_must_be_in_the_code_that_was_proven(world: World) -> None:
    world.record(proof(world.consumer, backend=world.backend))
    with pytest.raises(UnprovenConsumerError, match=r"its handler is in .*test_gate"):
        world.process(lambda event, session: None)
    handler = consumers.bill_async if world.base.asynchronous else consumers.bill
    assert world.process(handler).handling == "done"


# ── evidence is for the code ────────────────────────────────────────────────────────────────────────────

CONSUMER = """
import json
from onceward import ConsumerTask
from onceward.inbox import Contract
from verified_shop.helpers import amount

class Bill(ConsumerTask):
    contract = Contract(consumer_id="billing", event_types=["order"], owner_team="shop",
                        idempotency_mechanism="one transaction")

    def process_transaction(self, transaction, session):
        from . import late
        session.execute("INSERT INTO bills VALUES (:id, :total)",
                        {"id": transaction.id, "total": amount(transaction.payload)})
"""
HELPERS = "from .deeper import rule\n\ndef amount(payload):\n    return rule(payload['total'])\n"
DEEPER = "import decimal\nimport sqlalchemy\n\ndef rule(total):\n    return total * 1\n"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "verified_shop"
    folder.mkdir()
    for name, source in {
        "__init__": "",
        "consumer": CONSUMER,
        "helpers": HELPERS,
        "deeper": DEEPER,
        "late": "LATE = 1\n",
        "unrelated": "X = 1\n",
    }.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.startswith("verified_shop")]:
        del sys.modules[name]


def digest_of_shop() -> Code:
    for name in [name for name in sys.modules if name.startswith("verified_shop")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    bill = importlib.import_module("verified_shop.consumer").Bill
    return code_of(bill, bill.contract)


@pytest.mark.req("CC-030")
def test_the_digest_covers_helpers_of_the_user_s_package_and_nothing_else(shop: Path) -> None:
    before = digest_of_shop()
    assert before.modules == (
        "verified_shop.consumer",
        "verified_shop.deeper",
        "verified_shop.helpers",
        "verified_shop.late",
    )
    assert digest_of_shop() == before
    for name in ("consumer", "helpers", "deeper", "late"):
        source = (shop / f"{name}.py").read_text()
        (shop / f"{name}.py").write_text(source + "\nCHANGED = True\n")
        assert digest_of_shop().digest != before.digest, name
        (shop / f"{name}.py").write_text(source)
    (shop / "unrelated.py").write_text("X = 2\n")
    assert digest_of_shop().digest == before.digest


@pytest.mark.req("CC-030")
def test_comments_and_layout_do_not_void_evidence_and_code_does(shop: Path) -> None:
    before = digest_of_shop()
    (shop / "deeper.py").write_text(DEEPER.replace("total * 1", "(total\n      * 1)  # a comment") + "\n\n\n")
    assert digest_of_shop().digest == before.digest
    (shop / "deeper.py").write_text(DEEPER.replace("total * 1", "total * 2"))
    assert digest_of_shop().digest != before.digest


def test_loose_modules_count_their_neighbors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loose_consumer.py").write_text(CONSUMER.replace("verified_shop.helpers", "loose_helpers"))
    (tmp_path / "loose_helpers.py").write_text(
        "import json, msgspec\n\ndef amount(p):\n    return p['total']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("loose_consumer")
    assert code_of(module.Bill).modules == ("loose_consumer", "loose_helpers")


# ── kill -9 while recording ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-030")
@pytest.mark.parametrize("point", ["before", "after the insert", "after the commit"])
def test_kill_9_while_recording_leaves_whole_evidence_or_none(database: Database, point: str) -> None:  # noqa: F811
    if database.asynchronous:
        return  # evidence is recorded in threads only
    world = World(database)

    def record(_: Any) -> None:
        engine = database.engine()
        store = store_of(engine.dialect, lambda: 1.0)
        with DbSession(engine) as session:
            if point == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            session.run(record_evidence, store, proof(backend=engine.dialect.name))
            if point == "after the insert":
                os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    database.plain().dispose()  # a child must not share it
    assert run_in_child(record, 30.0).was_killed
    if point == "after the commit":
        assert world.run().succeeded == 1
    else:
        assert database.scalar("SELECT count(*) FROM onceward_evidence") == 0
        with pytest.raises(UnprovenConsumerError, match="no verification of it is recorded"):
            world.run()

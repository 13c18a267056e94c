"""The production gate: without evidence for its current code, a consumer does not run."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onceward.connectors import AsyncMemoryConnector, MemoryConnector
from onceward.db import DbSession
from onceward.inbox import AsyncInbox, Inbox, UnprovenConsumerError
from onceward.inbox.evidence import evidence
from onceward.inbox.evidence.code_digest import Code, code_of
from onceward.inbox.evidence.evidence import Checked, Evidence
from onceward.inbox.stores import store_of
from onceward.transaction import Transaction
from onceward.verify.children import run_in_child
from tests.support.databases import Database, database  # noqa: F401  a fixture
from tests.verification import consumers

EVENT = Transaction(id="order-1", payload={"total": 10}, metadata={"event_type": "order"})
GOOD = (Checked("duplicates", "passed"), Checked("replay", "passed"))
BILLS = "CREATE TABLE bills (id TEXT, total INTEGER)"
MARKS = "CREATE TABLE marks (id TEXT)"


def proof(consumer: Any = consumers.Right, **changes: Any) -> Evidence:
    facts: dict[str, Any] = {
        "consumer_id": consumer.contract.consumer_id,
        "subject": f"{consumer.__module__}:{consumer.__qualname__}",
        "tested": GOOD,
        "code": code_of(consumer, consumer.contract),
        "schema_versions": (1,),
        "backend": "sqlite",
        "mechanism": "bill and dedup record in one transaction",
        "onceward": "0",
        "seed": 1,
    }
    return Evidence(**{**facts, **changes})


class World:
    """A consumer's database, with an inbox in production."""

    def __init__(self, base: Database, env: str | None = "production") -> None:
        self.base = base
        kind = AsyncInbox if base.asynchronous else Inbox
        self.inbox: Any = kind(base.default, env=env)
        self._await(self.inbox.migrate())
        self._await(self.inbox.register(consumers.Right.contract))
        base.do(BILLS, MARKS)

    def record(self, found: Evidence) -> None:
        store = store_of(self.base.plain().dialect, lambda: 1_700_000_000.0)
        with self.base.session() as session:
            session.run(evidence.record_evidence, store, found)

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
    world.record(proof(world.consumer))
    assert world.run().succeeded == 1
    assert world.run().duplicates == 1


@pytest.mark.req("CC-001", "CC-030")
@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"tested": (*GOOD, Checked("kills", "failed"))}, "its verification failed: kills"),
        ({"tested": (Checked("replay", "passed"),)}, "did not include duplicates"),
        (
            {"tested": (Checked("duplicates", "passed"), Checked("replay", "skipped"))},
            "did not include replay",
        ),
        ({"tested": ()}, "did not include duplicates and replay"),
        ({"mechanism": " "}, "without a description of its idempotency mechanism"),
        ({"code": Code(("x",), ("x",), "other")}, "its code has changed since it was verified"),
        ({"schema_versions": (7,)}, "schema version 7, but this is 1"),
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
    found = [
        proof(tested=(Checked("kills", "failed"),)),
        proof(),
    ]
    contract, code = consumers.Right.contract, consumers.Right
    assert "failed: kills" in str(evidence.lacking(contract, code, found))
    assert evidence.lacking(contract, code, found[::-1]) is None
    other = msgspec.structs.replace(found[0], code=Code((), (), "other"))
    assert evidence.lacking(contract, code, [other, proof()]) is None


@pytest.mark.req("CC-001")
def test_the_environment_shuts_the_gate_and_a_parameter_goes_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Database("sqlite", "threads", f"sqlite:///{tmp_path}/test.db")
    world = World(base, env=None)
    assert world.run().succeeded == 1, "outside production nothing is checked"
    monkeypatch.setenv("ONCEWARD_ENV", "Production")
    world.inbox = Inbox(base.default)
    with pytest.raises(UnprovenConsumerError):
        world.run()
    world.inbox = Inbox(base.default, env="staging")
    assert world.run().succeeded == 1
    base.close()


@pytest.mark.req("CC-001")
def test_a_handler_of_process_must_be_in_the_code_that_was_proven(world: World) -> None:
    world.record(proof(world.consumer))
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
            session.run(evidence.record_evidence, store, proof())
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

"""The production gate of an app: all its consumers at once, with evidence from a file, and what has no contract."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import URL, create_engine, text
from sqlalchemy.engine import make_url

from onceward import AsyncConsumerTask, ConsumerTask, Onceward, Transaction
from onceward.app.build import open_task, set_gate, task_class
from onceward.connectors import AsyncMemoryConnector, MemoryConnector
from onceward.deadletters.dry_run import dry_run
from onceward.errors import ConfigurationError
from onceward.inbox import Contract, Inbox, UnprovenConsumerError
from onceward.inbox.evidence.file import write_evidence
from onceward.inbox.evidence.keys import public_line
from onceward.inspection.guarantee_facts import facts_of
from onceward.inspection.guarantees import judge
from onceward.inspection.proofs import problem_of
from onceward.run.run import check
from onceward.verify import examine_consumer
from tests.support import commands
from tests.support.disk import disk
from tests.support.schema import new_schema
from tests.verification.proofs import proof

__all__ = ["disk"]

KEY = Ed25519PrivateKey.generate()


def contract(name: str, *types: str) -> Contract:
    return Contract(
        consumer_id=name, event_types=types, owner_team="shop", idempotency_mechanism="one transaction"
    )


def shop(folder: Path, **settings: Any) -> Onceward:
    app = Onceward("shop", database=f"sqlite:///{folder}/shop.db", **settings)

    @app.consumer(f"sqlite:///{folder}/orders.db", contract=contract("billing", "order"))
    def charge(order: dict[str, Any], session: Any) -> None: ...

    @app.consumer(f"sqlite:///{folder}/refunds.db", contract=contract("refunds", "refund", "order"))
    def refund(order: dict[str, Any], session: Any) -> None: ...

    @app.consumer(f"sqlite:///{folder}/mail.db")
    def mail(order: dict[str, Any]) -> None: ...

    @app.consumer(f"sqlite:///{folder}/log.db", contract=None)
    def log(order: dict[str, Any]) -> None: ...

    return app


def carried(folder: Path, *found: Any) -> dict[str, Any]:
    """Settings for a file with this evidence."""
    write_evidence(folder / "evidence.json", found, KEY)
    return {
        "env": "production",
        "evidence": str(folder / "evidence.json"),
        "evidence_keys": [public_line(KEY)],
    }


def proven(app: Onceward, name: str, **changes: Any) -> Any:
    return proof(task_class(app.consumers[name]), **changes)


@pytest.mark.req("CC-068")
def test_all_consumers_that_may_not_run_are_named_at_once_with_their_reasons(tmp_path: Path) -> None:
    check(shop(tmp_path))  # not in production
    app = shop(tmp_path, env="production")
    with pytest.raises(UnprovenConsumerError) as caught:
        check(app)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    for name, line in zip(("billing", "refunds"), lines, strict=False):
        assert f"consumer {name!r} does not run in production: no verification of it is recorded" in line
        assert "onceward verify " in line
        command = f"onceward inbox migrate --database {app.database}"
        assert f"no tables yet; create them first with `{command}`" in line
    assert "consumer 'mail' does not run in production: it has no contract" in lines[2]
    assert "write out contract=None" in lines[2]
    for name, starts in (("mail", False), ("log", True), ("charge", False)):
        links = judge(facts_of(app, app.consumers[name])).links
        assert any("it does not start at all" in each.why for each in links) is not starts, name
    check(app, only=["log"])
    with pytest.raises(UnprovenConsumerError, match="'mail'"), open_task(app, app.consumers["mail"]):
        pass
    with open_task(app, app.consumers["log"]) as task:
        assert task.consume_transactions().processed == 0


@pytest.mark.req("CC-123")
@pytest.mark.parametrize(
    ("sampled", "headline"),
    [
        (("order",), "effects once: transactional, proven only for event type order"),
        (("a", "", "c", "d"), "effects once: transactional, proven only for event types a, (none), c, …"),
        ((), "unknown, at best effects once: transactional"),
    ],
)
@pytest.mark.usefixtures("disk")
def test_where_every_type_is_accepted_the_headline_names_those_that_had_a_sample(
    tmp_path: Path, sampled: tuple[str, ...], headline: str
) -> None:
    def with_every_type(**settings: Any) -> Onceward:
        app = shop(tmp_path, **settings)

        @app.consumer(f"sqlite:///{tmp_path}/every.db", contract=contract("every", "*"))
        def every(order: dict[str, Any], session: Any) -> None: ...

        return app

    evidence = proven(with_every_type(), "every", event_types=sampled)
    app = with_every_type(**carried(tmp_path, evidence))
    assert judge(facts_of(app, app.consumers["every"])).headline == headline


@pytest.mark.req("CC-068")
def test_each_reason_is_the_consumer_s_own(tmp_path: Path) -> None:
    plain = shop(tmp_path)
    charge = proven(plain, "charge", backend="postgresql")
    refund = proven(plain, "refund", event_types=("order",))
    app = shop(tmp_path, **carried(tmp_path, charge, refund))
    with pytest.raises(UnprovenConsumerError) as caught:
        check(app, only=["charge", "refund"])
    one, two = str(caught.value).splitlines()
    assert "it was verified on postgresql" in one
    assert "its verification had no event of type refund" in two


@pytest.mark.req("CC-069")
def test_a_file_opens_the_gate_without_the_table_of_evidence(tmp_path: Path) -> None:
    """So it needs no right to write there, nor even to read."""
    app = shop(tmp_path)
    app = shop(tmp_path, **carried(tmp_path, proven(app, "charge"), proven(app, "refund")))
    engine = create_engine(app.database)
    Inbox(engine).migrate()
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE onceward_evidence"))
    check(app, only=["charge", "refund"])
    with open_task(app, app.consumers["charge"]) as task:
        assert task.consume_transactions().processed == 0
    assert facts_of(app, app.consumers["charge"]).proven
    Path(tmp_path / "evidence.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="is not a file of `onceward verify --out`"):
        check(app, only=["charge"])
    with (
        pytest.raises(ConfigurationError, match="is not a file of"),
        open_task(app, app.consumers["charge"]) as task,
    ):
        task.consume_transactions()


@pytest.mark.req("CC-068")
def test_the_variable_wins_over_the_code_and_an_option_over_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCEWARD_ENV", "production")
    app = shop(tmp_path, env="development")
    with pytest.raises(UnprovenConsumerError):
        check(app)
    app.override("command line", env="staging")
    check(app)
    with open_task(app, app.consumers["charge"]) as task:
        assert task.consume_transactions().processed == 0


@pytest.mark.req("CC-069")
def test_a_dry_run_goes_by_the_evidence_of_its_app(tmp_path: Path) -> None:
    app = shop(tmp_path)
    app = shop(tmp_path, **carried(tmp_path, proven(app, "charge")))
    engine = create_engine(app.database)
    inbox = Inbox(engine)
    inbox.migrate()
    for name in ("charge", "refund"):
        consumer = app.consumers[name]
        assert consumer.contract is not None
        inbox.register(consumer.contract)
        set_gate(inbox, app)
        task = task_class(consumer)({"source": MemoryConnector()}, {"inbox": inbox})
        if name == "charge":
            assert dry_run(task, [], engine) == []
        else:
            with pytest.raises(UnprovenConsumerError, match="'refunds' does not run in production"):
                dry_run(task, [], engine)
    engine.dispose()


class Silent(ConsumerTask):
    def process_transaction(self, transaction: Any) -> None: ...  # type: ignore[override]


class SilentAsync(AsyncConsumerTask):
    async def process_transaction(self, transaction: Any) -> None: ...  # type: ignore[override]


class Outspoken(Silent):
    contract = None


class Late(Silent):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.contract = None


@pytest.mark.req("CC-068")
def test_a_task_without_a_contract_says_so_in_production(monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"source": MemoryConnector()}
    assert Silent(source).consume_transactions().processed == 0
    monkeypatch.setenv("ONCEWARD_ENV", "production")
    with pytest.raises(ConfigurationError, match="Silent does not run in production: it has no contract"):
        Silent(source).consume_transactions()
    assert Outspoken(source).consume_transactions().processed == 0
    assert Late(source).consume_transactions().processed == 0
    with pytest.raises(ConfigurationError, match="SilentAsync does not run in production"):
        asyncio.run(SilentAsync({"source": AsyncMemoryConnector()}).consume_transactions())


# ── verify ──────────────────────────────────────────────────────────────────────────────────────────────


class Two(ConsumerTask):
    contract = contract("two", "order", "refund")

    def process_transaction(self, transaction: Any, session: Any) -> None:  # type: ignore[override]
        session.execute("INSERT INTO seen VALUES (:id)", {"id": transaction.id})


def seen(engine: Any) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE seen (id TEXT)"))


@pytest.mark.req("CC-068")
def test_every_event_type_needs_an_event_and_a_partial_run_proves_nothing() -> None:
    events = [{"tracking_id": "1", "payload": {}, "event_type": "order"}]
    report = examine_consumer(Two, events, setup=seen, only=["duplicates"])
    assert not report.failed
    assert (report.passed, report.proves, report.missing_types) == (False, False, ("refund",))
    assert "Not proven: no event of type refund, which its contract accepts" in str(report)
    events.append({"tracking_id": "2", "payload": {}, "event_type": "refund"})
    report = examine_consumer(Two, events, setup=seen, only=["duplicates"])
    assert (report.passed, report.proves, report.missing_types) == (True, False, ())
    assert "replay" in report.gaps
    assert "did not run, and a partial verification does not open production" in str(report)
    assert {each.scenario: each.result for each in report.evidence().tested}["replay"] == "skipped"


@pytest.fixture
def role(postgres_url: str) -> Iterator[URL]:
    """A role that may do everything with an inbox but see its evidence."""
    name = f"gate_{uuid4().hex[:8]}"
    server = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
        connection.execute(text(f"CREATE ROLE {name} LOGIN PASSWORD 'x'"))
    engine = create_engine(server.url.set(database=name))
    Inbox(engine).migrate()
    with engine.begin() as connection:
        connection.execute(text(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}"))
        connection.execute(text(f"REVOKE ALL ON onceward_evidence FROM {name}"))
    engine.dispose()
    yield server.url.set(database=name, username=name, password="x")
    with server.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
        connection.execute(text(f"DROP ROLE {name}"))
    server.dispose()


@pytest.mark.req("CC-069")
def test_a_role_that_may_not_read_evidence_is_refused_not_kept_waiting(role: URL, tmp_path: Path) -> None:
    url = role.render_as_string(hide_password=False)
    app = Onceward("shop", database=url, env="production")
    app.consumer(f"sqlite:///{tmp_path}/orders.db", contract=contract("billing", "order"))(unread)
    with pytest.raises(UnprovenConsumerError, match="and this role may not read onceward_evidence"):
        check(app)
    engine = create_engine(role)
    inbox = Inbox(engine, env="production")
    inbox.register(contract("billing", "order"))
    with pytest.raises(UnprovenConsumerError, match="and this role may not read onceward_evidence"):
        inbox.process(contract("billing", "order"), EVENT, unread)
    engine.dispose()


def unread(order: dict[str, Any], session: Any) -> None: ...


@pytest.mark.req("CC-102")
@pytest.mark.parametrize("level", ["read committed", "serializable"])
def test_the_isolation_level_is_checked_before_the_start_too(
    level: str, postgres_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "evidence.json"
    with new_schema(postgres_url) as schema:
        app = Onceward("shop", database=schema.plain_url, evidence=str(file), evidence_unsigned=True)
        app.consumer(f"sqlite:///{tmp_path}/orders.db", contract=contract("billing", "order"))(unread)
        [consumer] = app.consumers.values()
        write_evidence(file, [proof(task_class(consumer), backend="postgresql", isolation=level)], None)
        problem = problem_of(app, consumer)
    if level == "read committed":
        assert problem is None
    else:
        assert "verified with the isolation level 'serializable'" in str(problem)


EVENT = Transaction(id="1", payload={}, metadata={"event_type": "order"})


@pytest.mark.req("CC-140")
def test_the_relay_of_the_outbox_runs_in_production(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from onceward import Onceward\n"
        "app = Onceward('shop', database='sqlite:///shop.db')\n"
        "@app.consumer('sqlite:///log.db', contract=None)\n"
        "def log(order: dict) -> None: ...\n"
    )
    environment = {**os.environ, "ONCEWARD_ENV": "production", "PYTHONPATH": str(tmp_path)}
    done = commands.onceward("run", "shop:app", "--drain", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.req("CC-069")
def test_a_role_that_may_not_create_databases_learns_where_to_verify(postgres_url: str) -> None:
    engine = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("CREATE ROLE gate_poor LOGIN PASSWORD 'x'"))
    poor = make_url(postgres_url).set(username="gate_poor", password="x")
    try:
        with pytest.raises(
            ConfigurationError, match=r"the role 'gate_poor' may not create databases.*--run-on"
        ):
            examine_consumer(
                Two, [{"tracking_id": "1", "payload": {}, "event_type": "order"}], setup=seen,
                database=poor.render_as_string(hide_password=False),
            )  # fmt: skip
    finally:
        with engine.connect() as connection:
            connection.execute(text("DROP ROLE gate_poor"))
        engine.dispose()

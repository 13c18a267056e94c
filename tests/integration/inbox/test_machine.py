"""The inbox as a state machine: copies, failures, kills and expired leases in any order, compared with a model."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Engine, create_engine, event, text

from onceward.inbox import Busy, ContractError, Inbox
from onceward.inbox.errors import Breach
from onceward.testing.clock import FakeClock
from onceward.testing.inbox import samples
from onceward.testing.inbox.samples import LONG_AGO, Killed, contract
from tests.support.inbox.databases import empty
from tests.support.schema import Schema, new_schema

LEASE = 30.0
POISON = 3
IDS = st.sampled_from(["a", "b", "c"])
MODES = st.sampled_from(["transactional", "effectful"])
HOW = st.sampled_from(["succeeds", "succeeds", "fails", "is killed", "is killed after its effect"])


class InboxMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = FakeClock(LONG_AGO.timestamp() + 86400)
        self.done: set[tuple[str, str]] = set()
        """Mode and id."""
        self.unended: Counter[tuple[str, str]] = Counter()
        self.locked: dict[tuple[str, str], float] = {}
        """Until when a start without an end keeps copies out."""
        self.charges: dict[str, tuple[str, str]] = {}

    @initialize()
    def begin(self) -> None:
        self.engine = self.opened()
        self.inbox = Inbox(self.engine, clock=self.clock)
        self.inbox.migrate()
        self.contracts = {
            mode: contract(mode, mode=mode, lease=LEASE, poison_after=POISON)
            for mode in ("transactional", "effectful")
        }
        for each in self.contracts.values():
            self.inbox.register(each)

    def opened(self) -> Engine:
        engine = create_engine(f"sqlite:///{self.folder}/inbox.db")

        @event.listens_for(engine, "connect")
        def connect(connection: Any, _: Any) -> None:
            connection.execute("PRAGMA synchronous = OFF").close()

        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS written (tracking_id TEXT)")
        return engine

    @rule(id_=IDS, mode=MODES, how=HOW, amount=st.sampled_from([1, 1, 1, 2]))
    def deliver(self, id_: str, mode: str, how: str, amount: int) -> None:
        this = (mode, id_)
        ran = []

        def handle(current: Any, session: Any) -> None:
            ran.append(how)
            if how == "is killed":
                raise Killed
            if mode == "effectful":
                session.effect("charge", lambda key: self.charges.setdefault(key, this) and key)
            samples.write(samples.event(f"{mode} {id_}"), session)
            if how == "is killed after its effect":
                raise Killed
            if how == "fails":
                raise ValueError("broken")

        refused = None
        copy = samples.event(id_, {"amount": amount if this in self.done else 1})
        conflicting = this in self.done and amount != 1
        busy = self.locked.get(this, 0.0) > self.now() and this not in self.done
        poison = self.unended[this] >= POISON and this not in self.done and not busy
        try:
            result = self.inbox.process(self.contracts[mode], copy, handle)
        except Killed:
            assert ran == [how]
            self.unended[this] += 1
            self.locked[this] = self.now() + LEASE
        except Busy:
            assert busy
            assert not ran
        except ContractError as error:
            refused = error.kind
        except ValueError:
            assert ran == ["fails"]
        else:
            assert not busy
            assert result.done is (this not in self.done)
            assert ran == (["succeeds"] if result.done else [])
            self.done.add(this)
        assert not (ran and refused)
        assert refused is (Breach.CONFLICT if conflicting else Breach.POISON if poison else None)

    def now(self) -> float:
        return self.clock()

    @rule(seconds=st.sampled_from([1.0, LEASE + 1]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def restart(self) -> None:
        self.inbox = Inbox(self.engine, clock=self.clock)

    @invariant()
    def each_event_has_its_effects_once(self) -> None:
        with self.engine.connect() as connection:
            written = Counter(connection.execute(text("SELECT tracking_id FROM written")).scalars())
        assert written == Counter(f"{mode} {id_}" for mode, id_ in self.done)
        charges = Counter(self.charges.values())
        assert set(charges.values()) <= {1}
        assert {this for this in self.done if this[0] == "effectful"} <= set(charges)

    def teardown(self) -> None:
        if "engine" in self.__dict__:
            self.engine.dispose()
        shutil.rmtree(self.folder)


@pytest.mark.hypothesis
@pytest.mark.req("ST-12")
def test_on_sqlite() -> None:
    machine: Any = InboxMachine
    run_state_machine_as_test(machine, settings=settings(max_examples=12, stateful_step_count=25))


@pytest.mark.hypothesis
@pytest.mark.req("ST-12")
def test_on_postgresql(postgres_url: str) -> None:
    with new_schema(postgres_url) as schema:
        schema.execute(f"CREATE TABLE {schema.name}.written (tracking_id TEXT)")
        machine: Any = on_postgresql(schema)
        run_state_machine_as_test(machine, settings=settings(max_examples=4, stateful_step_count=20))


def on_postgresql(schema: Schema) -> type[InboxMachine]:
    class OnPostgreSql(InboxMachine):
        """The server's clock stays, so what was written moves into the past."""

        def opened(self) -> Engine:
            empty(schema)
            options = {"options": f"-csearch_path={schema.name} -csynchronous_commit=off"}
            return create_engine(schema.url, connect_args=options)

        @rule(seconds=st.sampled_from([1.0, LEASE + 1]))
        def wait(self, seconds: float) -> None:
            self.clock.advance(seconds)
            schema.execute(
                f"UPDATE {schema.name}.onceward_attempts SET locked_until = locked_until - {seconds}"
            )

    return OnPostgreSql

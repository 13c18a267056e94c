"""Random schedules of deliveries, failures, crashes and restarts, compared with a trivial model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onceward.inbox import Breach, Busy, Contract, ContractError, Handling
from onceward.testing.inbox.driver import InboxDriver
from onceward.testing.inbox.effects import Provider
from onceward.testing.inbox.samples import Killed, contract, event
from onceward.testing.inbox.suite import InboxSuite

POISON_AFTER = 2
EVENTS, CONSUMERS = 2, ("one", "two")

deliveries = st.tuples(
    st.sampled_from(["succeed", "fail", "crash", "conflict"]),
    st.integers(0, EVENTS - 1),
    st.sampled_from(CONSUMERS),
)
schedules = st.lists(deliveries | st.just(("wait", 0, "")) | st.just(("restart", 0, "")), max_size=14)


class InboxModel:
    """One event for one consumer: applied, or not yet."""

    def __init__(self) -> None:
        self.applied: bool | None = None
        """Whether with the other payload; None if not applied."""
        self.in_flight = False
        self.crashes = 0

    def expect(self, how: str) -> str:
        """The outcome that a delivery must have."""
        other = how == "conflict"
        if self.applied is not None:
            return "duplicate" if self.applied is other else "conflict"
        if self.in_flight:
            return "busy"
        if self.crashes >= POISON_AFTER:
            return "poison"
        if how in ("succeed", "conflict"):
            self.applied = other
            return "done"
        self.in_flight = how == "crash"
        self.crashes += how == "crash"
        return how


class Schedules(InboxSuite):
    @pytest.mark.hypothesis
    @pytest.mark.req("CC-002")
    @pytest.mark.req("CC-012")
    @pytest.mark.parametrize("mode", ["transactional", "effectful"])
    def test_any_schedule_of_deliveries_failures_crashes_and_retries_applies_each_event_once(
        self, mode: str
    ) -> None:
        promised = {name: contract(name, mode=mode, poison_after=POISON_AFTER) for name in CONSUMERS}
        rounds = itertools.count()
        with self.inbox(*promised.values()) as first:

            @settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
            @given(schedules)
            def play(schedule: list[tuple[str, int, str]]) -> None:
                self.play(first, promised, f"round {next(rounds)}, event ", schedule)

            play()

    def play(
        self,
        first: InboxDriver,
        promised: dict[str, Contract],
        prefix: str,
        schedule: list[tuple[str, int, str]],
    ) -> None:
        model = {(number, name): InboxModel() for number in range(EVENTS) for name in CONSUMERS}
        provider = Provider()
        inbox = first
        for how, number, name in schedule:
            if how == "wait":
                self.advance(first, 61)
                for each in model.values():
                    each.in_flight = False
            elif how == "restart" and inbox is first:
                inbox = self.restart(first)
            elif how not in ("wait", "restart"):
                expected = model[number, name].expect(how)
                ended = self.deliver(inbox, promised[name], f"{prefix}{number}", how, provider)
                assert ended == expected
        if inbox is not first:
            inbox.__exit__(None, None, None)
        rows = first.rows("SELECT tracking_id FROM written WHERE tracking_id LIKE :mine", mine=f"{prefix}%")
        applied = [f"{prefix}{number}" for (number, _), each in model.items() if each.applied is not None]
        assert sorted(row["tracking_id"] for row in rows) == sorted(applied)
        for key in set(provider.keys):
            assert key.startswith(prefix)
        assert len(set(provider.keys)) <= len(model), "one key for each event and consumer"

    def restart(self, first: InboxDriver) -> InboxDriver:
        """Another process, which knows only the contents of the database."""
        return InboxDriver(self.engine(), first.clock)

    def deliver(
        self, inbox: InboxDriver, promised: Contract, tracking_id: str, how: str, provider: Provider
    ) -> str:
        def handle(event: Any, session: Any) -> None:
            if promised.mode == "effectful":
                session.effect("charge", provider.charge)
            session.execute("INSERT INTO written (tracking_id) VALUES (:id)", {"id": event.tracking_id})
            if how == "fail":
                raise RuntimeError(how)
            if how == "crash":
                raise Killed(how)

        delivered = event(tracking_id, {"other": True} if how == "conflict" else {"amount": 1})
        try:
            result = inbox.process(promised, delivered, handle)
        except Busy:
            return "busy"
        except ContractError as error:
            return {Breach.CONFLICT: "conflict", Breach.POISON: "poison"}[error.kind]
        except RuntimeError:
            return "fail"
        except Killed:
            return "crash"
        return "done" if result.handling is Handling.DONE else "duplicate"

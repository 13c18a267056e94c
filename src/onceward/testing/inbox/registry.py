"""The registry: only registered consumers run."""

from __future__ import annotations

import logging

import pytest

from onceward.errors import ConfigurationError
from onceward.inbox import Handling, UnregisteredConsumerError
from onceward.testing.clock import FakeClock
from onceward.testing.inbox.driver import InboxDriver
from onceward.testing.inbox.samples import contract, event, never, write
from onceward.testing.inbox.suite import InboxSuite

FIELDS = ("consumer_id", "event_types", "owner_team", "idempotency_mechanism")


class Registration(InboxSuite):
    @pytest.mark.req("CC-040")
    def test_an_unregistered_consumer_does_not_run_and_is_told_what_to_do(self) -> None:
        with self.inbox(contract("known")) as inbox:
            with pytest.raises(UnregisteredConsumerError, match=r"'billing'.*known.*register") as refused:
                inbox.process(contract("billing"), event("e1"), never)
            assert isinstance(refused.value, ConfigurationError)
            assert inbox.rows("SELECT * FROM onceward_attempts") == []
            inbox.call("register", contract("billing"))
            assert inbox.process(contract("billing"), event("e1"), write).handling is Handling.DONE

    @pytest.mark.req("CC-040")
    def test_the_registry_lists_who_consumes_what_for_whom_and_how_it_meets_duplicates(self) -> None:
        mine = contract("billing", event_types=["order.paid", "order.lost"], owner_team="payments")
        with self.inbox(mine, contract("archive", event_types=["*"])) as inbox:
            rows = {row["consumer_id"]: row["contract"] for row in inbox.call("consumers")}
            assert list(rows) == ["archive", "billing"]
            registered = rows["billing"]
            assert {name: registered[name] for name in FIELDS} == {
                "consumer_id": "billing",
                "event_types": ["order.paid", "order.lost"],
                "owner_team": "payments",
                "idempotency_mechanism": "dedup row and order in one transaction",
            }

    @pytest.mark.req("CC-040")
    def test_registering_again_changes_the_entry_and_keeps_when_it_began(self) -> None:
        with self.inbox() as inbox:
            [before] = inbox.call("consumers")
            self.advance(inbox, 10)
            inbox.call("register", contract(owner_team="finance"))
            [after] = inbox.call("consumers")
            assert after["contract"]["owner_team"] == "finance"
            assert after["registered_at"] == before["registered_at"]

    @pytest.mark.req("CC-040")
    def test_a_consumer_that_was_taken_off_the_registry_does_not_run(self) -> None:
        with self.inbox() as inbox:
            inbox.process(contract(), event("e1"), write)
            assert inbox.call("unregister", "billing")
            assert not inbox.call("unregister", "billing")
            with pytest.raises(UnregisteredConsumerError):
                inbox.process(contract(), event("e2"), never)

    @pytest.mark.req("CC-040")
    def test_running_under_another_contract_than_the_registered_one_is_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with self.inbox() as inbox:
            with caplog.at_level(logging.WARNING):
                inbox.process(contract(owner_team="finance"), event(), write)
            assert [r.getMessage() for r in caplog.records if "owner_team" in r.getMessage()]

    def test_a_database_without_tables_is_refused_with_the_way_to_make_them(self) -> None:
        with (
            InboxDriver(self.engine_without_tables(), FakeClock()) as inbox,
            pytest.raises(ConfigurationError, match=r"migrate"),
        ):
            inbox.process(contract(), event(), never)

    def test_migrating_again_changes_nothing(self) -> None:
        with self.inbox() as inbox:
            inbox.process(contract(), event("e1"), write)
            assert inbox.call("migrate") == []
            assert inbox.process(contract(), event("e1"), never).duplicate

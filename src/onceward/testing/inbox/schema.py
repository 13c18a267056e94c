"""Every schema version that a producer ever sent reaches the handler as the current one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from onceward.inbox import Breach, Contract, ContractError, Event, Handling
from onceward.testing.inbox.samples import contract, event, never, write
from onceward.testing.inbox.suite import InboxSuite


class OrderV3(msgspec.Struct):
    """An order in schema version 3."""

    cents: int
    currency: str
    note: str = "none"


def to_2(payload: dict[str, Any]) -> dict[str, Any]:
    """Upcast in place, as upcasters often do; the original payload must not change."""
    payload["cents"] = payload.pop("euros") * 100
    return payload


def to_3(payload: dict[str, Any]) -> dict[str, Any]:
    return {**payload, "currency": "EUR"}


def third_version(**more: Any) -> Contract:
    return contract(schema_version=3, upcasters={1: to_2, 2: to_3}, model=OrderV3, **more)


OLD_AND_NEW = [
    {"euros": 7},
    {"schema_version": 2, "cents": 700},
    {"schema_version": 3, "cents": 700, "currency": "EUR"},
]


def sent(tracking_id: str, payload: dict[str, Any]) -> dict[str, Any]:
    """An event as it arrives. A payload without a version has version 1."""
    return {
        "tracking_id": tracking_id,
        "event_type": "order.paid",
        "created_at": "2020-05-05T12:00:00Z",
        "payload": dict(payload),
    }


class Schema(InboxSuite):
    @pytest.mark.req("CC-021")
    @pytest.mark.parametrize("payload", OLD_AND_NEW, ids=["version 1", "version 2", "version 3"])
    def test_every_version_reaches_the_handler_as_the_current_one(self, payload: dict[str, Any]) -> None:
        with self.inbox(third_version()) as inbox:
            seen: list[Event] = []
            inbox.process(third_version(), sent("e1", payload), lambda each, _: seen.append(each))
            assert [each.payload for each in seen] == [OrderV3(700, "EUR")]
            assert seen[0].schema_version == 3

    @pytest.mark.req("CC-021")
    @pytest.mark.parametrize("payload", OLD_AND_NEW, ids=["version 1", "version 2", "version 3"])
    def test_a_copy_of_any_version_is_a_duplicate_since_the_original_is_compared(
        self, payload: dict[str, Any]
    ) -> None:
        with self.inbox(third_version()) as inbox:
            inbox.process(third_version(), sent("e1", payload), write)
            assert inbox.process(third_version(), sent("e1", payload), never).duplicate
            with pytest.raises(ContractError) as refused:
                inbox.process(third_version(), sent("e1", {**payload, "cents": 1, "euros": 1}), never)
            assert refused.value.kind is Breach.CONFLICT

    @pytest.mark.req("CC-021")
    def test_an_event_done_by_an_older_consumer_is_a_duplicate_for_the_newer_one(self) -> None:
        with self.inbox(third_version()) as inbox:
            inbox.process(contract(), sent("e1", {"euros": 7}), write)
            assert inbox.process(third_version(), sent("e1", {"euros": 7}), never).duplicate

    @pytest.mark.req("CC-021")
    def test_an_unknown_field_is_ignored_and_a_missing_optional_one_has_its_default(self) -> None:
        with self.inbox(third_version()) as inbox:
            seen: list[Any] = []
            payload = {"schema_version": 3, "cents": 1, "currency": "EUR", "color": "red"}
            inbox.process(third_version(), sent("e1", payload), lambda each, _: seen.append(each.payload))
            assert seen == [OrderV3(1, "EUR", "none")]

    @pytest.mark.req("CC-021")
    def test_a_newer_version_is_a_contract_failure_until_the_consumer_knows_it(self) -> None:
        payload = {"schema_version": 4, "cents": 1, "currency": "EUR"}
        fourth = contract(schema_version=4, model=OrderV3)
        with self.inbox(third_version()) as inbox:
            for _ in range(5):
                with pytest.raises(ContractError) as refused:
                    inbox.process(third_version(), sent("e1", payload), never)
                assert refused.value.kind is Breach.SCHEMA
            assert inbox.process(fourth, sent("e1", payload), write).handling is Handling.DONE, "redriven"

    @pytest.mark.req("CC-021")
    def test_a_version_that_the_chain_does_not_reach_is_a_contract_failure(self) -> None:
        promised = contract(schema_version=3, upcasters={2: to_3}, model=OrderV3)
        with self.inbox(promised) as inbox:
            with pytest.raises(ContractError, match="no upcaster from 1 to 2") as refused:
                inbox.process(promised, sent("e1", {"euros": 7}), never)
            assert refused.value.kind is Breach.SCHEMA
            assert inbox.rows("SELECT * FROM onceward_dedup") == []

    @pytest.mark.req("CC-021")
    def test_an_upcaster_that_raises_is_a_contract_failure_that_names_the_step_and_no_payload(self) -> None:
        with self.inbox(third_version()) as inbox:
            with pytest.raises(ContractError, match="from 1 to 2") as refused:
                inbox.process(third_version(), sent("e1", {"secret": "4711"}), never)
            assert refused.value.kind is Breach.SCHEMA
            assert "4711" not in str(refused.value)

    @pytest.mark.req("CC-021")
    def test_a_payload_that_is_not_what_the_model_says_is_a_contract_failure(self) -> None:
        with self.inbox(third_version()) as inbox:
            with pytest.raises(ContractError) as refused:
                inbox.process(third_version(), sent("e1", {"schema_version": 3, "cents": "4711"}), never)
            assert refused.value.kind is Breach.PAYLOAD
            assert "4711" not in str(refused.value)

    @pytest.mark.req("CC-021")
    def test_without_a_model_the_payload_comes_as_the_chain_left_it(self) -> None:
        promised = contract(schema_version=2, upcasters={1: to_2})
        with self.inbox(promised) as inbox:
            seen: list[Any] = []
            inbox.process(promised, event(payload={"euros": 3}), lambda each, _: seen.append(each.payload))
            assert seen == [{"cents": 300}]

"""One id is one event, whatever else differs between its copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from onceward.inbox import Breach, ContractError, Handling
from onceward.testing.inbox.effects import Provider, charging, effectful
from onceward.testing.inbox.samples import contract, event, never, raising, together, write
from onceward.testing.inbox.suite import InboxSuite
from onceward.transaction import Transaction

MIDNIGHT = datetime(2026, 3, 1, tzinfo=UTC)
BEFORE, AFTER = MIDNIGHT - timedelta(seconds=1), MIDNIGHT + timedelta(seconds=1)


def uuid7(at: datetime, noise: int = 1) -> str:
    return str(UUID(int=(int(at.timestamp() * 1000) << 80) | (7 << 76) | (2 << 62) | noise))


IDS = {
    "text": "order 17",
    "uuid4": "8b1c2e76-0f7e-4f0e-9a5d-3f6a1c2b4d5e",
    "uuid7": uuid7(BEFORE),
    "uuid7 of 1970": uuid7(datetime(1970, 1, 1, 12, tzinfo=UTC)),
    "uuid7 of 2300": uuid7(datetime(2300, 1, 1, tzinfo=UTC)),
    "last uuid7": "ffffffff-ffff-7fff-bfff-ffffffffffff",
}
SPELLINGS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "upper case": str.upper,
    "without dashes": lambda text: text.replace("-", ""),
    "braces": lambda text: f"{{{text}}}",
    "parentheses": lambda text: f"({text.upper()})",
    "urn": lambda text: f"urn:uuid:{text}",
    "upper urn": lambda text: f"URN:UUID:{text.upper()}",
    "blanks": lambda text: f"  {text}\u00a0",
    "a newline": lambda text: f"{text}\n",
    "a bit of all": lambda text: f" {{{text.replace('-', '').upper()}}} ",
}
every_id = pytest.mark.parametrize("tracking_id", IDS.values(), ids=IDS.keys())


def spellings(text: str) -> list[str]:
    return [spell(text) for spell in SPELLINGS.values()]


class Identity(InboxSuite):
    @pytest.mark.req("CC-053")
    @every_id
    def test_copies_on_both_sides_of_midnight_are_one_event(self, tracking_id: str) -> None:
        with self.inbox() as inbox:
            for first, second in ((BEFORE, AFTER), (AFTER, BEFORE)):
                name = tracking_id if first is BEFORE else tracking_id[:-1] + "0"
                assert (
                    inbox.process(contract(), event(name, created_at=first), write).handling is Handling.DONE
                )
                assert inbox.process(contract(), event(name, created_at=second), never).duplicate
                with inbox.session() as session:
                    assert inbox.process(
                        contract(), event(name, created_at=second), never, session=session
                    ).duplicate
            assert len(self.written(inbox)) == 2

    @pytest.mark.req("CC-053")
    @every_id
    def test_copies_years_apart_are_one_event(self, tracking_id: str) -> None:
        with self.inbox() as inbox:
            inbox.process(contract(), event(tracking_id), write)
            for year in (1971, 2019, 2031, 9999):
                copy = event(tracking_id, created_at=datetime(year, 6, 1, tzinfo=UTC))
                assert inbox.process(contract(), copy, never).duplicate

    @pytest.mark.req("CC-053")
    def test_a_joined_event_is_one_event_on_both_sides_of_midnight(self) -> None:
        with self.inbox() as inbox:
            with inbox.session() as session:
                inbox.process(contract(), event("e1", created_at=BEFORE), write, session=session)
                copy = event("e1", created_at=AFTER)
                assert inbox.process(contract(), copy, never, session=session).duplicate
            assert inbox.process(contract(), event("e1", created_at=AFTER), never).duplicate
            assert self.written(inbox) == ["e1"]

    @pytest.mark.req("CC-053")
    @every_id
    def test_an_effect_is_called_once_for_copies_on_both_sides_of_midnight(self, tracking_id: str) -> None:
        provider = Provider()
        with self.inbox(effectful()) as inbox:
            inbox.process(effectful(), event(tracking_id, created_at=BEFORE), charging(provider))
            copy = event(tracking_id, created_at=AFTER)
            assert inbox.process(effectful(), copy, charging(provider)).duplicate
            assert len(provider.keys) == 1

    @pytest.mark.req("CC-053")
    def test_a_retry_with_another_created_at_and_spelling_uses_the_result_of_the_effect(self) -> None:
        provider = Provider()
        tracking_id = IDS["uuid4"]
        crash = charging(provider, then=raising(RuntimeError("after the charge")))
        with self.inbox(effectful()) as inbox:
            with pytest.raises(RuntimeError, match="after the charge"):
                inbox.process(effectful(), event(tracking_id, created_at=BEFORE), crash)
            copy = event(tracking_id.upper(), created_at=AFTER)
            assert inbox.process(effectful(), copy, charging(provider)).value == {"receipt": 1}
            assert len(provider.keys) == 1
            assert provider.keys[0].startswith(f"{tracking_id}-1-")

    @pytest.mark.req("CC-053")
    def test_many_copies_at_once_with_different_days_and_spellings_take_effect_once(self) -> None:
        tracking_id = str(uuid4())
        with self.inbox() as inbox, ExitStack() as stack:
            drivers = [inbox, *(stack.enter_context(self.another(inbox)) for _ in range(3))]

            def deliver(worker: int) -> str:
                copy = event(spellings(tracking_id)[worker], created_at=MIDNIGHT + timedelta(days=worker - 4))
                return str(drivers[worker % 4].settle(contract(), copy, write).handling)

            assert sorted(together(8, deliver)) == ["done"] + ["duplicate"] * 7
            assert self.written(inbox) == [tracking_id]

    @pytest.mark.req("CC-053")
    def test_a_transaction_that_is_produced_again_is_a_duplicate_whatever_time_it_is(self) -> None:
        with self.inbox() as inbox:
            sent = Transaction(id="order-17", metadata={"event_type": "order.paid"}, created_at=BEFORE)
            again = Transaction(id="order-17", metadata={"event_type": "order.paid"})
            inbox.process(contract(), sent, write)
            assert inbox.process(contract(), again, never).duplicate

    @pytest.mark.req("CC-053")
    def test_another_payload_on_another_day_is_still_a_contract_failure(self) -> None:
        with self.inbox() as inbox:
            inbox.process(contract(), event("e1", {"amount": 1}, created_at=BEFORE), write)
            with pytest.raises(ContractError) as refused:
                inbox.process(contract(), event("e1", {"amount": 2}, created_at=AFTER), never)
            assert refused.value.kind is Breach.CONFLICT

    @pytest.mark.req("CC-120")
    @pytest.mark.parametrize("mode", ["transactional", "effectful"])
    def test_another_event_type_with_the_same_payload_is_a_contract_failure(self, mode: str) -> None:
        both = contract(event_types=["order.paid", "order.cancelled"], mode=mode)
        with self.inbox(both) as inbox:
            inbox.process(both, event("e1"), lambda event, session: None)
            with pytest.raises(ContractError, match="another payload or event type") as refused:
                inbox.process(both, event("e1", event_type="order.cancelled"), never)
            assert refused.value.kind is Breach.CONFLICT
            assert inbox.process(both, event("e1"), never).duplicate

    @pytest.mark.req("CC-055")
    @pytest.mark.parametrize("tracking_id", [IDS["uuid4"], IDS["uuid7"], str(UUID(int=0))])
    def test_all_spellings_of_a_uuid_are_one_event(self, tracking_id: str) -> None:
        with self.inbox() as inbox:
            inbox.process(contract(), event(spellings(tracking_id)[-1]), write)
            for each in [*spellings(tracking_id), UUID(tracking_id)]:
                assert inbox.process(contract(), event(each), never).duplicate, each  # type: ignore[arg-type]
            assert self.written(inbox) == [tracking_id]

    @pytest.mark.req("CC-055")
    def test_other_ids_are_compared_as_they_are(self) -> None:
        digits = "0123456789abcdef0123456789abcde"  # one too few
        others = [
            "e1",
            "E1",
            " e1",
            "e1 ",
            "{e1}",
            digits,
            digits.upper(),
            f"{digits}-",
            f"{{{digits}f",
            f"{digits}f)",
        ]
        others += ["0123-456789ab-cdef-0123-456789abcdef", "urn:uuid:e1", "0123456789abcdef0123456789abcdeg"]
        with self.inbox() as inbox:
            for each in others:
                assert inbox.process(contract(), event(each), write).handling is Handling.DONE, each
            assert set(self.written(inbox)) == set(others)

    @pytest.mark.req("CC-055")
    def test_a_hold_names_the_event_in_any_spelling(self) -> None:
        tracking_id = IDS["uuid4"]
        with self.inbox() as inbox:
            inbox.process(contract(), event(tracking_id), write)
            assert inbox.call("hold", "billing", tracking_id.upper(), reason="case 7", operator="anna")
            assert not inbox.call("hold", "billing", f"{{{tracking_id}}}", reason="case 7", operator="anna")
            assert [row["tracking_id"] for row in inbox.call("holds")] == [tracking_id]
            assert inbox.call(
                "release", "billing", tracking_id.replace("-", ""), reason="closed", operator="anna"
            )

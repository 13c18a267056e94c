"""Processing inside the caller's session, which the caller commits."""

from __future__ import annotations

import pytest

from onceward.errors import ConfigurationError
from onceward.inbox import Breach, ContractError, EffectError, Handling, UnregisteredConsumerError
from onceward.testing.inbox.effects import effectful
from onceward.testing.inbox.samples import contract, event, never, raising, write
from onceward.testing.inbox.suite import InboxSuite


class Joins(InboxSuite):
    @pytest.mark.req("CC-012")
    def test_row_and_writes_commit_with_the_callers_session(self) -> None:
        with self.inbox() as inbox:
            with inbox.session() as session:
                result = inbox.process(contract(), event("e1"), write, session=session)
                assert result.handling is Handling.DONE
            assert self.written(inbox) == ["e1"]
            with inbox.session() as session:
                assert inbox.process(contract(), event("e1"), never, session=session).duplicate
            assert inbox.process(contract(), event("e1"), never).duplicate

    @pytest.mark.req("CC-012")
    def test_row_and_writes_roll_back_with_the_callers_session(self) -> None:
        with self.inbox() as inbox:

            def fail_afterwards() -> None:
                with inbox.session() as session:
                    inbox.process(contract(), event("e1"), write, session=session)
                    raise RuntimeError("after it")

            with pytest.raises(RuntimeError, match="after it"):
                fail_afterwards()
            assert self.written(inbox) == []
            with inbox.session() as session:
                result = inbox.process(contract(), event("e1"), write, session=session)
            assert result.handling is Handling.DONE

    @pytest.mark.req("CC-012")
    def test_a_handler_that_raises_takes_the_callers_session_with_it(self) -> None:
        error = RuntimeError("inside")
        with self.inbox() as inbox:

            def fail_inside() -> None:
                with inbox.session() as session:
                    write(event("the caller's"), session)
                    inbox.process(contract(), event("e1"), raising(error), session=session)

            with pytest.raises(RuntimeError) as raised:
                fail_inside()
            assert raised.value is error
            assert self.written(inbox) == []

    @pytest.mark.req("CC-012")
    def test_several_events_in_one_session_are_all_or_none(self) -> None:
        with self.inbox() as inbox:
            with inbox.session() as session:
                for name in ("e1", "e2", "e1"):
                    inbox.process(contract(), event(name), write, session=session)
            assert self.written(inbox) == ["e1", "e2"]

    @pytest.mark.req("CC-002")
    def test_the_same_id_with_another_payload_is_refused_here_too(self) -> None:
        with self.inbox() as inbox:
            inbox.process(contract(), event("e1", {"amount": 1}), write)
            with pytest.raises(ContractError) as refused, inbox.session() as session:
                inbox.process(contract(), event("e1", {"amount": 2}), never, session=session)
            assert refused.value.kind is Breach.CONFLICT

    @pytest.mark.req("CC-051")
    def test_the_sources_count_of_deliveries_decides_about_poison(self) -> None:
        promised = contract(poison_after=3)
        with self.inbox(promised) as inbox:
            with pytest.raises(RuntimeError), inbox.session() as session:
                inbox.process(promised, event("e1", deliveries=3), raising(RuntimeError()), session=session)
            with inbox.session() as session, pytest.raises(ContractError, match="3 times") as refused:
                inbox.process(promised, event("e1", deliveries=4), never, session=session)
            assert refused.value.kind is Breach.POISON

    @pytest.mark.req("CC-059")
    def test_a_done_event_is_a_duplicate_however_often_it_was_delivered(self) -> None:
        promised = contract(poison_after=3)
        with self.inbox(promised) as inbox:
            with inbox.session() as session:
                inbox.process(promised, event("e1", deliveries=1), write, session=session)
            with inbox.session() as session:
                assert inbox.process(promised, event("e1", deliveries=9), never, session=session).duplicate

    @pytest.mark.req("CC-003")
    def test_effects_are_refused_here(self) -> None:
        with self.inbox(effectful("outside"), contract()) as inbox:
            with pytest.raises(ConfigurationError, match="effectful"), inbox.session() as session:
                inbox.process(effectful("outside"), event("e1"), never, session=session)
            with pytest.raises(EffectError), inbox.session() as session:
                inbox.process(
                    contract(), event("e1"), lambda _, given: given.effect("charge", never), session=session
                )

    def test_a_session_of_another_kind_is_refused(self) -> None:
        with self.inbox() as inbox, pytest.raises(ConfigurationError, match="DbSession"):
            inbox.process(contract(), event("e1"), never, session=object())

    @pytest.mark.req("CC-040")
    def test_an_unregistered_consumer_does_not_run_here_either(self) -> None:
        with (
            self.inbox(contract("known")) as inbox,
            pytest.raises(UnregisteredConsumerError),
            inbox.session() as session,
        ):
            inbox.process(contract(), event("e1"), never, session=session)

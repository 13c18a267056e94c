"""Keys of effects: one call for a name, no blind call once a key has expired, a new key after a refusal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Barrier
from typing import Any

import pytest

from onceward.durations import hours
from onceward.errors import ConfigurationError
from onceward.inbox import (
    NOT_DONE,
    Breach,
    ContractError,
    Done,
    EffectInDoubtError,
    EffectRefused,
    Event,
    Handling,
)
from onceward.task.exceptions import ExceptionCategory
from onceward.testing.inbox.effects import Provider, effectful
from onceward.testing.inbox.samples import Killed, event, raising, together, write
from onceward.testing.inbox.suite import InboxSuite

DAY = hours(24)


def charging(provider: Provider, **more: Any) -> Callable[[Event, Any], Any]:
    """A handler that charges under a key that the provider remembers for a day, then writes."""

    def handle(event: Event, session: Any) -> Any:
        receipt = session.effect("charge", provider.charge, **{"key_valid_for": DAY, **more})
        write(event, session)
        return receipt

    return handle


class EffectKeys(InboxSuite):
    # ── one name, one call ──────────────────────────────────────────────────────────────────────────────

    @pytest.mark.req("CC-056")
    def test_a_loop_that_ships_each_item_under_one_name_fails_and_says_to_name_each(self) -> None:
        provider = Provider()
        with self.inbox(effectful()) as inbox:

            def ship(event: Event, session: Any) -> None:
                for _ in range(3):
                    session.effect("ship", provider.charge)

            with pytest.raises(ContractError, match=r'"ship-\{item.id\}"') as refused:
                inbox.process(effectful(), event("e1"), ship)
            assert refused.value.kind is Breach.REPEATED_EFFECT
            assert refused.value.category is ExceptionCategory.BUSINESS, "a retry would fail the same way"
            assert len(provider.keys) == 1

    @pytest.mark.req("CC-056")
    def test_effects_with_names_of_their_own_all_happen(self) -> None:
        provider = Provider()
        with self.inbox(effectful()) as inbox:

            def ship(event: Event, session: Any) -> None:
                for item in range(3):
                    session.effect(f"ship-{item}", provider.charge)

            assert inbox.process(effectful(), event("e1"), ship).handling is Handling.DONE
            assert len(set(provider.keys)) == 3

    @pytest.mark.req("CC-056")
    def test_a_name_whose_first_call_failed_is_not_called_again_in_the_same_attempt(self) -> None:
        provider = Provider(TimeoutError("slow"))
        with self.inbox(effectful()) as inbox:

            def insist(event: Event, session: Any) -> None:
                with suppress(TimeoutError):
                    session.effect("charge", provider.charge)
                session.effect("charge", provider.charge)

            with pytest.raises(ContractError, match="twice"):
                inbox.process(effectful(), event("e1"), insist)
            assert len(provider.keys) == 1
            assert inbox.process(effectful(), event("e1"), charging(provider)).handling is Handling.DONE

    @pytest.mark.req("CC-056")
    @pytest.mark.parametrize("reaction", ["swallows", "replaces"])
    def test_a_handler_that_catches_the_error_commits_nothing(self, reaction: str) -> None:
        provider = Provider()
        with self.inbox(effectful()) as inbox:

            def careless(event: Event, session: Any) -> None:
                session.effect("ship", provider.charge)
                try:
                    session.effect("ship", provider.charge)
                except Exception as error:
                    if reaction == "replaces":
                        raise RuntimeError("shipping failed") from error
                write(event, session)

            with pytest.raises(ContractError, match="twice"):
                inbox.process(effectful(), event("e1"), careless)
            assert (len(provider.keys), self.written(inbox)) == (1, [])

    @pytest.mark.req("CC-056")
    def test_of_two_at_the_same_time_only_one_is_called(self) -> None:
        provider = Provider()
        with self.inbox(effectful()) as inbox:
            meeting = Barrier(2)

            def ship(event: Event, session: Any) -> None:
                def one(_: int) -> None:
                    meeting.wait(10)
                    session.effect("ship", provider.charge)

                errors = [each for each in together(2, one) if isinstance(each, Exception)]
                assert len(errors) == 1
                raise errors[0]

            with pytest.raises(ContractError, match="twice"):
                inbox.process(effectful(), event("e1"), ship)
            assert len(provider.keys) == 1

    # ── keys that expire ────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.req("CC-057")
    @pytest.mark.parametrize("failure", [TimeoutError("slow"), Killed()], ids=["raised", "killed"])
    def test_past_the_validity_of_its_key_an_effect_in_doubt_is_not_called(
        self, failure: BaseException
    ) -> None:
        provider = Provider(failure)
        with self.inbox(effectful()) as inbox:
            with pytest.raises(type(failure)):
                inbox.process(effectful(), event("e1"), charging(provider))
            self.advance(inbox, effectful().lease + 1)
            self.age(inbox, 86399 - 120)
            with pytest.raises(TimeoutError):
                inbox.process(effectful(), event("e1"), charging(Provider(TimeoutError("again"))))
            self.age(inbox, 121)
            for _ in range(2):
                with pytest.raises(EffectInDoubtError, match="onceward inbox resolve") as doubt:
                    inbox.process(effectful(), event("e1"), charging(provider))
            assert (doubt.value.kind, doubt.value.category) == (Breach.IN_DOUBT, ExceptionCategory.BUSINESS)
            assert (len(provider.keys), self.written(inbox)) == (1, [])
            [row] = inbox.call("effects")
            assert (row["valid_for"], bool(row["expired"])) == (86400, True)

    @pytest.mark.req("CC-057")
    @pytest.mark.parametrize("reaction", ["swallows", "replaces"])
    def test_a_handler_that_catches_the_doubt_commits_nothing(self, reaction: str) -> None:
        provider = Provider(TimeoutError("slow"))
        with self.inbox(effectful()) as inbox:

            def careless(event: Event, session: Any) -> None:
                try:
                    session.effect("charge", provider.charge, key_valid_for=DAY)
                except ContractError as error:
                    if reaction == "replaces":
                        raise RuntimeError("not charged") from error
                write(event, session)

            with pytest.raises(TimeoutError):
                inbox.process(effectful(), event("e1"), careless)
            self.age(inbox, 86401)
            with pytest.raises(EffectInDoubtError):
                inbox.process(effectful(), event("e1"), careless)
            assert (len(provider.keys), self.written(inbox)) == (1, [])

    @pytest.mark.req("CC-057")
    @pytest.mark.parametrize("later", [None, hours(48)], ids=["removed", "longer"])
    def test_later_code_does_not_extend_the_validity(self, later: Any) -> None:
        provider = Provider(TimeoutError("slow"))
        with self.inbox(effectful()) as inbox:
            with pytest.raises(TimeoutError):
                inbox.process(effectful(), event("e1"), charging(provider))
            self.age(inbox, 86401)
            with pytest.raises(EffectInDoubtError):
                inbox.process(effectful(), event("e1"), charging(provider, key_valid_for=later))
            assert len(provider.keys) == 1

    @pytest.mark.req("CC-057")
    def test_later_code_can_shorten_it_or_state_it_for_the_first_time(self) -> None:
        for known in (None, DAY):
            provider = Provider(TimeoutError("slow"))
            with self.inbox(effectful()) as inbox:
                name = f"e-{known}"
                with pytest.raises(TimeoutError):
                    inbox.process(effectful(), event(name), charging(provider, key_valid_for=known))
                self.age(inbox, 7200)
                with pytest.raises(EffectInDoubtError):
                    inbox.process(
                        effectful(), event(name), charging(provider, key_valid_for=timedelta(hours=1))
                    )
                assert len(provider.keys) == 1

    @pytest.mark.req("CC-057")
    def test_without_a_validity_the_same_key_is_used_however_old(self) -> None:
        provider = Provider(TimeoutError("slow"))
        with self.inbox(effectful()) as inbox:
            with pytest.raises(TimeoutError):
                inbox.process(effectful(), event("e1"), charging(provider, key_valid_for=None))
            self.age(inbox, 86400 * 30)
            inbox.process(effectful(), event("e1"), charging(provider, key_valid_for=None))
            assert len(provider.keys) == 2
            assert len(set(provider.keys)) == 1

    @pytest.mark.req("CC-057")
    def test_past_the_validity_reconcile_is_asked_and_its_answer_counts(self) -> None:
        provider = Provider(TimeoutError("slow"), TimeoutError("slow"))
        with self.inbox(effectful()) as inbox:
            for name in ("done", "not done"):
                with pytest.raises(TimeoutError):
                    inbox.process(effectful(), event(name), charging(provider))
            self.age(inbox, 86401)
            found = charging(provider, reconcile=lambda _: Done("receipt 7"))
            assert inbox.process(effectful(), event("done"), found).value == "receipt 7"
            assert len(provider.keys) == 2
            missing = charging(provider, reconcile=lambda _: NOT_DONE)
            assert inbox.process(effectful(), event("not done"), missing).handling is Handling.DONE
            assert provider.keys[1] == provider.keys[2]

    @pytest.mark.req("CC-057")
    def test_a_call_after_reconcile_begins_the_validity_again(self) -> None:
        provider = Provider(TimeoutError("slow"), TimeoutError("slow"))
        with self.inbox(effectful()) as inbox:
            with pytest.raises(TimeoutError):
                inbox.process(effectful(), event("e1"), charging(provider))
            self.age(inbox, 86401)
            with pytest.raises(TimeoutError):
                inbox.process(effectful(), event("e1"), charging(provider, reconcile=lambda _: NOT_DONE))
            assert inbox.process(effectful(), event("e1"), charging(provider)).handling is Handling.DONE

    @pytest.mark.req("CC-057")
    def test_a_reconcile_that_gives_no_answer_calls_nobody(self) -> None:
        provider = Provider(TimeoutError("slow"))
        with self.inbox(effectful()) as inbox:
            with pytest.raises(TimeoutError):
                inbox.process(effectful(), event("e1"), charging(provider))
            self.age(inbox, 86401)
            with pytest.raises(ConnectionError):
                inbox.process(
                    effectful(), event("e1"), charging(provider, reconcile=raising(ConnectionError("away")))
                )
            with pytest.raises(EffectInDoubtError, match="NOT_DONE"):
                inbox.process(effectful(), event("e1"), charging(provider, reconcile=lambda _: None))
            assert len(provider.keys) == 1

    @pytest.mark.req("CC-057")
    @pytest.mark.parametrize("nonsense", [0, -1, float("inf"), "24h", True, timedelta(0)], ids=str)
    def test_a_validity_that_is_no_duration_is_refused_before_the_call(self, nonsense: Any) -> None:
        provider = Provider()
        with self.inbox(effectful()) as inbox, pytest.raises(ConfigurationError, match="hours"):
            inbox.process(effectful(), event("e1"), charging(provider, key_valid_for=nonsense))
        assert provider.keys == []

    @pytest.mark.req("CC-057")
    def test_the_validity_in_use_can_be_asked_for(self) -> None:
        with self.inbox(effectful()) as inbox:
            inbox.process(effectful(), event("e1"), charging(Provider(), key_valid_for=3600))
            inbox.process(effectful(), event("e2"), charging(Provider()))
            inbox.process(effectful(), event("e3"), charging(Provider(), key_valid_for=None))
            assert inbox.call("key_validity", "billing") == [
                {"name": "charge", "valid_for": 3600.0, "without": 1}
            ]

    # ── refusals ────────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.req("CC-058")
    def test_a_refused_effect_is_not_in_doubt_and_is_called_again_with_a_new_key(self) -> None:
        provider = Provider(EffectRefused("card declined"), EffectRefused("card declined"))
        with self.inbox(effectful()) as inbox:
            for _ in range(2):
                with pytest.raises(EffectRefused, match="declined") as refused:
                    inbox.process(effectful(), event("e1"), charging(provider))
                assert refused.value.category is ExceptionCategory.BUSINESS
                assert inbox.call("effects") == []
                [row] = inbox.call("effects", in_doubt=False)
                assert (row["state"], "declined" in row["error"]) == ("refused", True)
                self.age(inbox, 86401)
            assert inbox.process(effectful(), event("e1"), charging(provider)).handling is Handling.DONE
            assert len(set(provider.keys)) == 3, "providers repeat their answer to an old key"

    @pytest.mark.req("CC-058")
    def test_the_new_key_is_new_even_if_the_starts_are_counted_from_one_again(self) -> None:
        provider = Provider(EffectRefused("no"))
        with self.inbox(effectful()) as inbox:
            with pytest.raises(EffectRefused):
                inbox.process(effectful(), event("e1"), charging(provider))
            inbox.do("DELETE FROM onceward_attempts")
            inbox.process(effectful(), event("e1"), charging(provider))
            assert len(set(provider.keys)) == 2

    @pytest.mark.req("CC-058")
    def test_an_effect_in_doubt_after_a_refusal_keeps_its_new_key(self) -> None:
        provider = Provider(EffectRefused("no"), TimeoutError("slow"))
        with self.inbox(effectful()) as inbox:
            for error in (EffectRefused, TimeoutError):
                with pytest.raises(error):
                    inbox.process(effectful(), event("e1"), charging(provider))
            inbox.process(effectful(), event("e1"), charging(provider))
            refused, doubtful, last = provider.keys
            assert refused != doubtful == last

    @pytest.mark.req("CC-058")
    def test_a_handler_may_catch_the_refusal_and_go_on(self) -> None:
        provider = Provider(EffectRefused("card declined"))
        with self.inbox(effectful()) as inbox:

            def handle(event: Event, session: Any) -> None:
                with suppress(EffectRefused):
                    session.effect("charge", provider.charge)
                write(event, session)

            assert inbox.process(effectful(), event("e1"), handle).handling is Handling.DONE
            assert self.written(inbox) == ["e1"]

    @pytest.mark.req("CC-058")
    def test_reconcile_can_say_that_it_was_refused(self) -> None:
        provider = Provider(TimeoutError("slow"))
        with self.inbox(effectful()) as inbox:
            with pytest.raises(TimeoutError):
                inbox.process(effectful(), event("e1"), charging(provider))
            with pytest.raises(EffectRefused):
                inbox.process(
                    effectful(), event("e1"), charging(provider, reconcile=raising(EffectRefused("declined")))
                )
            assert inbox.call("effects") == []
            inbox.process(effectful(), event("e1"), charging(provider))
            assert len(set(provider.keys)) == 2

    def age(self, inbox: Any, seconds: float) -> None:
        """Let the effects grow old: the database has its own clock."""
        inbox.do(f"UPDATE onceward_effects SET intended_at = intended_at - {seconds}")

"""Effects outside the database: one key each, recorded before the call, with the result recorded after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onceward.db import SessionError
from onceward.inbox import NOT_DONE, Contract, Done, EffectError, EffectInDoubtError, Event, Handling
from onceward.testing.inbox.samples import Killed, contract, event, never, raising, write
from onceward.testing.inbox.suite import InboxSuite


class Provider:
    """A fake provider. Records the key of every call, and raises as its script says."""

    def __init__(self, *script: BaseException | None) -> None:
        self.keys: list[str] = []
        self._script = list(script)

    def charge(self, key: str) -> dict[str, Any]:
        self.keys.append(key)
        failure = self._script.pop(0) if self._script else None
        if failure is not None:
            raise failure
        return {"receipt": len(self.keys)}


def effectful(consumer_id: str = "billing", **more: Any) -> Contract:
    return contract(consumer_id, mode="effectful", **more)


def charging(
    provider: Provider,
    reconcile: Callable[[str], Any] | None = None,
    *,
    then: Callable[..., Any] = write,
) -> Callable[[Event, Any], Any]:
    """A handler that charges, then writes, and returns the receipt."""

    def handle(event: Event, session: Any) -> Any:
        receipt = session.effect("charge", provider.charge, reconcile=reconcile)
        then(event, session)
        return receipt

    return handle


class Effects(InboxSuite):
    @pytest.mark.req("CC-003")
    def test_an_effect_is_called_once_with_a_key_that_names_the_event_and_its_first_claim(self) -> None:
        provider = Provider()
        with self.inbox(effectful()) as inbox:
            assert inbox.process(effectful(), event("e1"), charging(provider)).value == {"receipt": 1}
            assert inbox.process(effectful(), event("e1"), never).duplicate
            [key] = provider.keys
            assert key.startswith("e1-1-")
            assert self.written(inbox) == ["e1"]
            assert inbox.call("effects") == []
            [row] = inbox.call("effects", in_doubt=False)
            assert (row["name"], row["effect_key"], row["state"]) == ("charge", key, "done")

    @pytest.mark.req("CC-003")
    def test_the_intent_is_durable_before_the_call(self) -> None:
        with self.inbox(effectful()) as inbox, self.another(inbox) as other:
            seen: list[Any] = []

            def look(key: str) -> None:
                [row] = other.call("effects")
                seen.append((row["effect_key"] == key, row["state"]))

            inbox.process(effectful(), event(), lambda _, session: session.effect("look", look))
            assert seen == [(True, "intended")]

    @pytest.mark.req("CC-003")
    def test_the_key_stays_the_same_over_retries_and_new_claims(self) -> None:
        provider = Provider(TimeoutError("slow"), ConnectionError("gone"), Killed(), Killed())
        with self.inbox(effectful()) as inbox:
            for error in (TimeoutError, ConnectionError):
                with pytest.raises(error):
                    inbox.process(effectful(), event("e1"), charging(provider))
            self.crash(inbox, effectful(), event("e1"), charging(provider))
            with self.another(inbox) as other:
                self.crash(other, effectful(), event("e1"), charging(provider))
                assert other.process(effectful(), event("e1"), charging(provider)).value == {"receipt": 5}
            assert len(provider.keys) == 5
            assert len(set(provider.keys)) == 1
            assert self.written(inbox) == ["e1"]

    @pytest.mark.req("CC-003")
    def test_the_current_token_travels_beside_the_key_and_changes_with_each_claim(self) -> None:
        provider = Provider(TimeoutError("slow"))
        with self.inbox(effectful()) as inbox:
            tokens: list[str | None] = []

            def handle(event: Event, session: Any) -> None:
                tokens.append(event.lock_token)
                session.effect("charge", provider.charge)

            with pytest.raises(TimeoutError):
                inbox.process(effectful(), event("e1"), handle)
            inbox.process(effectful(), event("e1"), handle)
            assert tokens == ["1", "2"]
            assert len(set(provider.keys)) == 1

    @pytest.mark.req("CC-003")
    def test_what_a_call_returned_is_kept_and_a_retry_gets_it_without_calling(self) -> None:
        provider = Provider()
        with self.inbox(effectful()) as inbox:
            with pytest.raises(RuntimeError):
                inbox.process(effectful(), event("e1"), charging(provider, then=raising(RuntimeError())))
            self.crash(inbox, effectful(), event("e1"), charging(provider, then=raising(Killed())))
            assert inbox.process(effectful(), event("e1"), charging(provider)).value == {"receipt": 1}
            assert len(provider.keys) == 1

    @pytest.mark.req("CC-003")
    @pytest.mark.parametrize("failure", [TimeoutError("slow"), Killed()], ids=["raised", "crashed"])
    def test_a_call_without_a_known_end_is_listed_as_in_doubt(self, failure: BaseException) -> None:
        with self.inbox(effectful()) as inbox:
            with pytest.raises(type(failure)):
                inbox.process(effectful(), event("e1"), charging(Provider(failure)))
            [row] = inbox.call("effects")
            assert (row["consumer_id"], row["tracking_id"], row["name"]) == ("billing", "e1", "charge")
            assert row["state"] == "intended"
            assert ("slow" in (row["error"] or "")) == isinstance(failure, TimeoutError)
            [stats] = inbox.call("stats")
            assert stats["effects_in_doubt"] == 1

    @pytest.mark.req("CC-003")
    def test_in_doubt_without_a_hook_it_is_called_again_with_the_same_key(self) -> None:
        provider = Provider(Killed())
        with self.inbox(effectful()) as inbox:
            self.crash(inbox, effectful(), event("e1"), charging(provider))
            inbox.process(effectful(), event("e1"), charging(provider))
            first, second = provider.keys
            assert first == second
            assert inbox.call("effects") == []

    @pytest.mark.req("CC-003")
    def test_in_doubt_and_reconciled_as_done_it_is_not_called_again(self) -> None:
        provider, asked = Provider(Killed()), []
        with self.inbox(effectful()) as inbox:
            self.crash(inbox, effectful(), event("e1"), charging(provider))

            def reconcile(key: str) -> Done:
                asked.append(key)
                return Done("found")

            assert inbox.process(effectful(), event("e1"), charging(provider, reconcile)).value == "found"
            assert asked == provider.keys
            assert len(provider.keys) == 1
            assert inbox.call("effects") == []

    @pytest.mark.req("CC-003")
    def test_in_doubt_and_reconciled_as_not_done_it_is_called_again_with_the_same_key(self) -> None:
        provider = Provider(TimeoutError("slow"))
        with self.inbox(effectful()) as inbox:
            with pytest.raises(TimeoutError):
                inbox.process(effectful(), event("e1"), charging(provider))
            inbox.process(effectful(), event("e1"), charging(provider, lambda _: NOT_DONE))
            first, second = provider.keys
            assert first == second
            assert inbox.call("effects") == []

    @pytest.mark.req("CC-003")
    def test_a_hook_that_raises_leaves_it_in_doubt_and_uncalled(self) -> None:
        provider = Provider(TimeoutError("slow"))
        with self.inbox(effectful()) as inbox:
            with pytest.raises(TimeoutError):
                inbox.process(effectful(), event("e1"), charging(provider))
            with pytest.raises(LookupError, match="who knows"):
                inbox.process(effectful(), event("e1"), charging(provider, raising(LookupError("who knows"))))
            assert len(provider.keys) == 1
            assert len(inbox.call("effects")) == 1
            assert self.written(inbox) == []

    @pytest.mark.req("CC-003")
    @pytest.mark.parametrize("nonsense", [None, True, "done", {}], ids=str)
    def test_a_hook_that_gives_no_answer_leaves_it_in_doubt_and_uncalled(self, nonsense: Any) -> None:
        provider = Provider(TimeoutError("slow"))
        with self.inbox(effectful()) as inbox:
            with pytest.raises(TimeoutError):
                inbox.process(effectful(), event("e1"), charging(provider))
            with pytest.raises(EffectInDoubtError, match="NOT_DONE"):
                inbox.process(effectful(), event("e1"), charging(provider, lambda _: nonsense))
            assert len(provider.keys) == 1
            assert len(inbox.call("effects")) == 1

    @pytest.mark.req("CC-003")
    def test_a_hook_is_not_asked_about_an_effect_that_is_new_or_done(self) -> None:
        provider = Provider()
        with self.inbox(effectful()) as inbox:
            not_asked = raising(AssertionError("the hook was called"))
            with pytest.raises(RuntimeError):
                inbox.process(
                    effectful(), event("e1"), charging(provider, not_asked, then=raising(RuntimeError()))
                )
            inbox.process(effectful(), event("e1"), charging(provider, not_asked))
            assert len(provider.keys) == 1

    @pytest.mark.req("CC-003")
    def test_two_effects_of_an_event_and_those_of_two_consumers_have_keys_of_their_own(self) -> None:
        provider = Provider()
        one, two = effectful("billing"), effectful("shipping")

        def handle(event: Event, session: Any) -> None:
            session.effect("charge", provider.charge)
            session.effect("mail", provider.charge)

        with self.inbox(one, two) as inbox:
            for promised in (one, two):
                inbox.process(promised, event("e1"), handle)
            assert len(set(provider.keys)) == 4

    @pytest.mark.req("CC-003")
    def test_an_effect_after_a_write_is_refused_and_nothing_is_lost(self) -> None:
        provider = Provider()
        with self.inbox(effectful()) as inbox:

            def handle(event: Event, session: Any) -> None:
                write(event, session)
                session.effect("charge", provider.charge)

            with pytest.raises(SessionError, match="effects come before writes"):
                inbox.process(effectful(), event("e1"), handle)
            assert (provider.keys, self.written(inbox)) == ([], [])
            assert inbox.process(effectful(), event("e1"), charging(provider)).handling is Handling.DONE

    @pytest.mark.req("CC-003")
    def test_an_effect_after_writes_that_is_caught_commits_none_of_them(self) -> None:
        provider = Provider()
        with self.inbox(effectful()) as inbox:

            def handle(event: Event, session: Any) -> None:
                write(event, session)
                with pytest.raises(SessionError):
                    session.effect("charge", provider.charge)
                write(event, session)

            with pytest.raises(EffectError, match="'charge'"):
                inbox.process(effectful(), event("e1"), handle)
            assert self.written(inbox) == []
            assert provider.keys == []

    @pytest.mark.req("CC-003")
    def test_reads_before_and_between_effects_are_fine_and_writes_after_them_commit(self) -> None:
        provider = Provider()
        with self.inbox(effectful()) as inbox:

            def handle(event: Event, session: Any) -> int:
                found: int = session.execute_scalar("SELECT count(*) FROM written")
                session.effect("charge", provider.charge)
                found += session.execute_scalar("SELECT count(*) FROM written")
                session.effect("mail", provider.charge)
                write(event, session)
                return found

            assert inbox.process(effectful(), event("e1"), handle).value == 0
            assert self.written(inbox) == ["e1"]
            assert len(provider.keys) == 2

    @pytest.mark.req("CC-003")
    def test_no_lock_is_held_during_an_effect(self) -> None:
        with self.inbox(effectful(), patience=0.2) as inbox, self.another(inbox, patience=0.2) as other:

            def handle(event: Event, session: Any) -> None:
                session.fetch_all("SELECT * FROM written")
                session.effect("other", lambda _: other.do("INSERT INTO written (tracking_id) VALUES ('x')"))

            inbox.process(effectful(), event("e1"), handle)
            assert self.written(inbox) == ["x"]

    @pytest.mark.req("CC-003")
    def test_an_effect_in_transactional_mode_is_refused_by_name_and_the_event_is_not_lost(self) -> None:
        provider = Provider()
        with self.inbox() as inbox:
            with pytest.raises(EffectError, match="mode='effectful'"):
                inbox.process(contract(), event("e1"), charging(provider))
            assert (provider.keys, self.written(inbox)) == ([], [])
            assert inbox.process(contract(), event("e1"), write).handling is Handling.DONE

    @pytest.mark.req("CC-003")
    def test_an_effect_outside_the_handler_is_refused(self) -> None:
        provider = Provider()
        with self.inbox(effectful()) as inbox:
            sessions: list[Any] = []
            inbox.process(effectful(), event("e1"), lambda _, session: sessions.append(session))
            with pytest.raises(EffectError, match="running handler"):
                sessions[0].effect("charge", provider.charge)
            with pytest.raises(SessionError, match="ended"):
                write(event("e1"), sessions[0])
            assert (provider.keys, self.written(inbox)) == ([], [])

    @pytest.mark.req("CC-003")
    def test_a_result_that_cannot_be_kept_is_refused_and_the_effect_stays_in_doubt(self) -> None:
        with self.inbox(effectful()) as inbox:
            with pytest.raises(EffectError, match="plain data"):
                inbox.process(
                    effectful(), event("e1"), lambda _, session: session.effect("odd", lambda key: object())
                )
            assert len(inbox.call("effects")) == 1

    @pytest.mark.req("CC-003")
    @pytest.mark.parametrize("name", ["", "x" * 201, None, 7], ids=["empty", "long", "none", "number"])
    def test_an_effect_without_a_proper_name_is_refused(self, name: Any) -> None:
        with self.inbox(effectful()) as inbox, pytest.raises(EffectError, match="name"):
            inbox.process(effectful(), event("e1"), lambda _, session: session.effect(name, never))

    @pytest.mark.req("CC-002")
    def test_an_event_that_is_done_before_its_effects_are_asked_for_calls_nobody(self) -> None:
        provider = Provider()
        with self.inbox(effectful()) as inbox:
            for _ in range(3):
                inbox.process(effectful(), event("e1"), charging(provider))
            assert len(provider.keys) == 1

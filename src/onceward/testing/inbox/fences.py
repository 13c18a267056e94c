"""An attempt that lost its lease to another one can no longer change anything."""

from __future__ import annotations

import time
from typing import Any

import pytest

from onceward.inbox import Busy, Event, Handling, LeaseLostError, attempts
from onceward.testing.inbox.driver import InboxDriver
from onceward.testing.inbox.effects import Provider, charging, effectful
from onceward.testing.inbox.samples import Held, event, never, raising, write
from onceward.testing.inbox.suite import InboxSuite


class Fences(InboxSuite):
    @pytest.mark.req("CC-012")
    def test_a_zombie_commits_nothing_after_another_attempt_has_finished_its_event(self) -> None:
        with self.inbox(effectful()) as inbox, self.another(inbox) as other, Held() as zombie:
            self.begin_zombie(inbox, zombie)
            self.advance(inbox, effectful().lease + 1)
            assert other.process(effectful(), event("e1"), write).handling is Handling.DONE
            assert isinstance(zombie.end(), LeaseLostError)
            assert self.written(inbox) == ["e1"], "what the zombie wrote is rolled back"
            assert inbox.process(effectful(), event("e1"), never).duplicate

    @pytest.mark.req("CC-012")
    def test_an_inbox_does_not_claim_again_what_an_attempt_of_its_own_still_has_in_hand(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(attempts, "PATIENCE", 0.1)
        with self.inbox(effectful()) as inbox, Held() as slow:
            self.begin_zombie(inbox, slow)
            self.advance(inbox, effectful().lease + 1)
            with pytest.raises(Busy, match="alone"):
                inbox.process(effectful(), event("e1"), never)
            assert slow.end().handling is Handling.DONE
            assert inbox.process(effectful(), event("e1"), never).duplicate
            assert self.written(inbox) == ["e1"]

    @pytest.mark.req("CC-012")
    def test_a_zombie_commits_nothing_after_several_others_have_claimed_its_event_and_given_up(self) -> None:
        """A token that named the worker, or was reused after a while, would let the zombie through."""
        with self.inbox(effectful()) as inbox, self.another(inbox) as other, Held() as zombie:
            self.begin_zombie(inbox, zombie)
            self.advance(inbox, effectful().lease + 1)
            for _ in range(3):
                with pytest.raises(RuntimeError):
                    other.process(effectful(), event("e1"), raising(RuntimeError()))
            self.abandon(other, effectful(), event("e1"))
            assert isinstance(zombie.end(), LeaseLostError)
            assert self.written(inbox) == []

    @pytest.mark.req("CC-012")
    def test_a_zombie_commits_nothing_while_another_attempt_still_runs(self) -> None:
        with self.inbox(effectful()) as inbox, Held() as zombie:
            self.begin_zombie(inbox, zombie)
            self.advance(inbox, effectful().lease + 1)
            with self.another(inbox) as other, Held() as second:
                second.begin(other.process, effectful(), event("e1"), staying(second)).until_inside()
                assert isinstance(zombie.end(), LeaseLostError)
                assert self.written(inbox) == []
                assert inbox.is_busy(effectful(), event("e1"), never), "the claim of the other stands"
                assert second.end().handling is Handling.DONE
            assert self.written(inbox) == ["e1"]

    @pytest.mark.req("CC-012")
    def test_a_zombie_commits_nothing_after_another_attempt_has_failed(self) -> None:
        with self.inbox(effectful()) as inbox, self.another(inbox) as other, Held() as zombie:
            self.begin_zombie(inbox, zombie)
            self.advance(inbox, effectful().lease + 1)
            with pytest.raises(RuntimeError, match="the second failed"):
                other.process(effectful(), event("e1"), raising(RuntimeError("the second failed")))
            assert isinstance(zombie.end(), LeaseLostError)
            assert self.written(inbox) == []
            assert inbox.process(effectful(), event("e1"), write).handling is Handling.DONE

    @pytest.mark.req("CC-003")
    def test_a_zombie_begins_no_effect(self) -> None:
        provider = Provider()
        with self.inbox(effectful()) as inbox, self.another(inbox) as other, Held() as zombie:

            def late(event: Event, session: Any) -> None:
                zombie.stay()
                session.effect("charge", provider.charge)

            zombie.begin(inbox.process, effectful(), event("e1"), late).until_inside()
            self.advance(inbox, effectful().lease + 1)
            other.process(effectful(), event("e1"), charging(provider))
            assert isinstance(zombie.end(), LeaseLostError)
            assert len(provider.keys) == 1

    @pytest.mark.req("CC-012")
    def test_an_attempt_whose_lease_ran_out_unnoticed_by_others_still_counts(self) -> None:
        with self.inbox(effectful()) as inbox, Held() as slow:
            self.begin_zombie(inbox, slow)
            self.advance(inbox, effectful().lease + 1)
            assert slow.end().handling is Handling.DONE
            assert self.written(inbox) == ["e1"]

    @pytest.mark.req("CC-012")
    def test_the_heartbeat_keeps_the_lease_of_a_long_handler(self) -> None:
        promised = effectful(lease=1.2)
        with self.inbox(promised, clock=time.time) as inbox, self.another(inbox) as other, Held() as long:
            long.begin(inbox.process, promised, event("e1"), staying(long)).until_inside()
            began = time.monotonic()
            while time.monotonic() - began < 1.5 * promised.lease:
                with pytest.raises(Busy):
                    other.process(promised, event("e1"), never)
                time.sleep(0.05)
            assert long.end().handling is Handling.DONE
            assert self.written(inbox) == ["e1"]

    @pytest.mark.req("CC-012")
    def test_the_heartbeat_of_a_short_lease_does_not_wait_for_that_of_a_long_one(self) -> None:
        patient, hasty = effectful("patient", lease=600), effectful("hasty", lease=1.2)
        with self.inbox(patient, hasty, clock=time.time) as inbox, Held() as one, Held() as two:
            one.begin(inbox.process, patient, event("e1"), staying(one)).until_inside()
            two.begin(inbox.process, hasty, event("e2"), staying(two)).until_inside()
            began = self.locked_until(inbox, "e2")
            deadline = time.monotonic() + 30
            while self.locked_until(inbox, "e2") == began:
                assert time.monotonic() < deadline, "no heartbeat"
                time.sleep(0.02)
            assert one.end().handling is two.end().handling is Handling.DONE

    @pytest.mark.req("CC-012")
    def test_a_session_says_at_once_that_the_lease_was_lost_when_the_heartbeat_has_noticed(self) -> None:
        promised = effectful(lease=1.2)
        with self.inbox(promised, clock=time.time) as inbox, Held() as zombie:
            self.begin_zombie(inbox, zombie, promised)
            [token] = inbox.rows("SELECT starts FROM onceward_attempts")
            inbox.do("UPDATE onceward_attempts SET starts = starts + 1")  # as another's claim does
            [claim] = inbox.inbox.processor.heartbeat.held[promised.lease]
            deadline = time.monotonic() + 30
            while not claim.lost:
                assert time.monotonic() < deadline, "the heartbeat never noticed"
                time.sleep(0.02)
            error = zombie.end()
            assert isinstance(error, LeaseLostError)
            assert token == {"starts": 1}
            assert self.written(inbox) == []

    def begin_zombie(self, inbox: InboxDriver, zombie: Held, promised: Any = None) -> None:
        zombie.begin(inbox.process, promised or effectful(), event("e1"), staying(zombie)).until_inside()

    def locked_until(self, inbox: InboxDriver, tracking_id: str) -> Any:
        [row] = inbox.rows(
            "SELECT locked_until FROM onceward_attempts WHERE tracking_id = :id", id=tracking_id
        )
        return row["locked_until"]


def staying(held: Held) -> Any:
    """A handler that stops until it is released, then writes."""

    def handle(event: Event, session: Any) -> None:
        held.stay()
        write(event, session)

    return handle

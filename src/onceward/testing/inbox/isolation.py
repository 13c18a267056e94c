"""A faulty consumer or event does not affect the others."""

from __future__ import annotations

import pytest

from onceward.inbox import Handling
from onceward.testing.inbox.effects import effectful
from onceward.testing.inbox.fences import staying
from onceward.testing.inbox.samples import Held, contract, event, raising, together, write, write_then
from onceward.testing.inbox.suite import InboxSuite


class Isolation(InboxSuite):
    @pytest.mark.req("CC-022")
    def test_a_consumer_that_always_fails_holds_no_other(self) -> None:
        bad, good = contract("bad"), contract("good")
        with self.inbox(bad, good) as inbox:
            for number in range(10):
                with pytest.raises(RuntimeError):
                    inbox.process(bad, event(f"e{number}"), raising(RuntimeError()))
                assert inbox.process(good, event(f"e{number}"), write).handling is Handling.DONE
            assert len(self.written(inbox)) == 10

    @pytest.mark.req("CC-022")
    def test_a_consumer_that_hangs_in_an_effect_holds_no_other(self) -> None:
        bad, good = effectful("bad"), contract("good")
        with self.inbox(bad, good) as inbox, Held() as hanging:
            hanging.begin(inbox.process, bad, event("e0"), staying(hanging)).until_inside()
            for number in range(10):
                assert inbox.process(good, event(f"e{number}"), write).handling is Handling.DONE
            assert len(self.written(inbox)) == 10
            assert hanging.end().handling is Handling.DONE

    @pytest.mark.req("CC-022")
    def test_a_consumer_that_hangs_in_its_transaction_holds_no_other_or_has_it_wait_without_loss(
        self,
    ) -> None:
        """If the database has one writer, the others are busy; nothing is lost, and all is done once it ends."""
        bad, good = contract("bad"), contract("good")
        with (
            self.inbox(bad, good) as inbox,
            self.another(inbox, patience=0.02) as other,
            Held() as hanging,
        ):
            inbox.process(good, event("before"), write)
            hanging.begin(inbox.process, bad, event("e0"), write_then(hanging.stay)).until_inside()
            for number in range(5):
                delivered = event(f"e{number}")
                if self.one_writer:
                    assert other.is_busy(good, delivered, write)
                else:
                    assert other.process(good, delivered, write).handling is Handling.DONE
            assert hanging.end().handling is Handling.DONE
            for number in range(5):
                other.settle(good, event(f"e{number}"), write)
            assert self.written(inbox) == ["before", "e0", "e0", "e1", "e2", "e3", "e4"]

    @pytest.mark.req("CC-022")
    @pytest.mark.parametrize("mode", ["transactional", "effectful"])
    def test_a_poisonous_consumer_leaves_the_rows_of_another_whole(self, mode: str) -> None:
        bad, good = contract("bad", mode=mode, poison_after=1), contract("good", mode=mode)
        with self.inbox(bad, good) as inbox:
            self.crash(inbox, bad, event("e1"))
            assert inbox.process(good, event("e1"), write).handling is Handling.DONE
            assert self.written(inbox) == ["e1"]

    @pytest.mark.req("CC-022")
    @pytest.mark.req("CC-012")
    @pytest.mark.parametrize("mode", ["transactional", "effectful"])
    def test_many_events_of_many_consumers_at_once_are_each_done_once(self, mode: str) -> None:
        consumers = [contract(name, mode=mode) for name in ("a", "b")]
        with self.inbox(*consumers) as inbox:

            def deliver(worker: int) -> None:
                for number in range(6):
                    inbox.settle(consumers[worker % 2], event(f"e{number}"), write)

            assert together(6, deliver) == [None] * 6
            assert self.written(inbox) == sorted(f"e{number}" for number in range(6) for _ in consumers)

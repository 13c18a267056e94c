"""An event that kills its processes is dead-lettered as poison, and no other event is."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from typing import Any

import pytest
from sqlalchemy import event as sqlalchemy_event

from onceward.inbox import Breach, ContractError, Handling
from onceward.inbox.attempts import everyone
from onceward.testing.inbox.driver import InboxDriver, until
from onceward.testing.inbox.effects import effectful
from onceward.testing.inbox.fences import staying
from onceward.testing.inbox.samples import Held, Killed, contract, event, never, raising, write
from onceward.testing.inbox.suite import InboxSuite


class InboxPoison(InboxSuite):
    @pytest.mark.req("CC-051")
    @pytest.mark.parametrize("mode", ["transactional", "effectful"])
    @pytest.mark.parametrize("most", [1, 3])
    def test_after_so_many_starts_without_an_end_it_is_poison_and_never_started_again(
        self, mode: str, most: int
    ) -> None:
        promised = contract(mode=mode, poison_after=most)
        with self.inbox(promised) as inbox:
            for _ in range(most):
                self.crash(inbox, promised, event("e1"))
            for _ in range(2):
                with pytest.raises(ContractError, match=f"started {most} time") as refused:
                    inbox.process(promised, event("e1"), never)
                assert refused.value.kind is Breach.POISON
            assert inbox.process(promised, event("e2"), write).handling is Handling.DONE, "others go on"

    @pytest.mark.req("CC-051")
    def test_starts_are_counted_over_all_processes(self) -> None:
        promised = contract(poison_after=2)
        with self.inbox(promised) as inbox:
            for _ in range(2):
                with self.another(inbox) as other:
                    self.crash(other, promised, event("e1"))
            with pytest.raises(ContractError) as refused:
                inbox.process(promised, event("e1"), never)
            assert refused.value.kind is Breach.POISON

    @pytest.mark.req("CC-051")
    def test_a_start_is_written_down_before_the_handler_runs(self) -> None:
        promised = effectful()
        with self.inbox(promised) as inbox, self.another(inbox) as other:
            seen: list[Any] = []
            inbox.process(
                promised,
                event(),
                lambda *_: seen.extend(other.rows("SELECT starts, ends FROM onceward_attempts")),
            )
            assert seen == [{"starts": 1, "ends": 0}]

    @pytest.mark.req("CC-051")
    def test_while_its_lease_lasts_a_crashed_event_is_busy(self) -> None:
        with self.inbox() as inbox:
            self.abandon(inbox, contract(), event("e1"))
            assert inbox.is_busy(contract(), event("e1"), never)
            self.advance(inbox, contract().lease + 1)
            assert inbox.process(contract(), event("e1"), write).handling is Handling.DONE

    @pytest.mark.req("CC-051")
    @pytest.mark.parametrize("mode", ["transactional", "effectful"])
    def test_failures_that_end_are_not_counted_however_many(self, mode: str) -> None:
        promised = contract(mode=mode, poison_after=2)
        with self.inbox(promised) as inbox:
            self.crash(inbox, promised, event("e1"))
            for _ in range(5):
                with pytest.raises(RuntimeError):
                    inbox.process(promised, event("e1"), raising(RuntimeError()))
            assert inbox.process(promised, event("e1"), write).handling is Handling.DONE

    @pytest.mark.req("CC-051")
    def test_an_attempt_that_is_cancelled_has_ended(self) -> None:
        """As by a timeout: it is redelivered at once, and not counted."""
        promised = contract(poison_after=2)
        cancelled = (asyncio.CancelledError, concurrent.futures.CancelledError)
        with self.inbox(promised) as inbox:
            for _ in range(5):
                with pytest.raises(cancelled):
                    inbox.process(promised, event("e1"), raising(asyncio.CancelledError()))
            assert inbox.process(promised, event("e1"), write).handling is Handling.DONE

    @pytest.mark.req("CC-051")
    def test_an_end_that_the_database_did_not_take_is_written_later_and_makes_no_poison(self) -> None:
        promised = contract(poison_after=2)
        with self.inbox(promised) as inbox:
            with failing(inbox, "SET ends"):
                with pytest.raises(ValueError, match="handler"):
                    inbox.process(promised, event("e1"), raising(ValueError("handler")))
                assert self.ledger(inbox) == {"e1": (1, 0)}
            for _ in range(3):
                with pytest.raises(ValueError, match="handler"):
                    inbox.process(promised, event("e1"), raising(ValueError("handler")))
            assert self.ledger(inbox) == {"e1": (4, 4)}
            assert inbox.process(promised, event("e1"), write).handling is Handling.DONE

    @pytest.mark.req("CC-051")
    def test_what_was_still_to_be_written_down_survives_a_start_that_is_refused_or_fails(self) -> None:
        promised = contract(poison_after=1)
        with self.inbox(promised) as inbox:
            self.crash(inbox, promised, event("poison"))
            with failing(inbox, "SET ends"), pytest.raises(ValueError, match="handler"):
                inbox.process(promised, event("e1"), raising(ValueError("handler")))
            with failing(inbox, "INSERT INTO onceward_attempts"), pytest.raises(RuntimeError, match="away"):
                inbox.process(promised, event("e2"), never)
            with pytest.raises(ContractError):
                inbox.process(promised, event("poison"), never)
            assert inbox.process(promised, event("e1"), write).handling is Handling.DONE

    @pytest.mark.req("CC-051")
    def test_a_done_event_is_a_duplicate_also_if_its_process_was_killed_before_the_ledger_was_cleared(
        self,
    ) -> None:
        promised = contract(poison_after=1)
        with self.inbox(promised) as inbox:
            inbox.process(promised, event("e1"), write)
            with self.another(inbox) as other:  # the ledger still says that the first inbox started it
                assert self.ledger(other) == {"e1": (1, 0)}
                assert other.process(promised, event("e1"), never).duplicate
                self.advance(other, promised.lease + 1)
                assert other.process(promised, event("e1"), never).duplicate
            assert self.written(inbox) == ["e1"]

    @pytest.mark.req("CC-051")
    def test_the_ledger_forgets_what_is_done(self) -> None:
        with self.inbox() as inbox:
            for number in range(5):
                inbox.process(contract(), event(f"e{number}"), write)
            assert len(self.ledger(inbox)) <= 1

    @pytest.mark.req("CC-051")
    def test_a_suspect_runs_alone(self) -> None:
        promised = effectful()
        with (
            self.inbox(promised) as inbox,
            Held() as neighbor,
            Held() as suspect,
            Held() as latecomer,
        ):
            self.crash(inbox, promised, event("suspect"))
            neighbor.begin(inbox.process, promised, event("neighbor"), staying(neighbor)).until_inside()
            suspect.begin(inbox.process, promised, event("suspect"), staying(suspect))
            until(lambda: inbox.inbox.processor.ports.gate.waiting)
            time.sleep(0.1)
            assert not suspect.is_inside, "beside the neighbor"
            neighbor.release()
            suspect.until_inside()
            assert neighbor.end().handling is Handling.DONE
            latecomer.begin(inbox.process, promised, event("latecomer"), staying(latecomer))
            until(lambda: "latecomer" in self.ledger(inbox))
            time.sleep(0.1)
            assert not latecomer.is_inside, "beside the suspect"
            assert suspect.end().handling is Handling.DONE
            assert latecomer.end().handling is Handling.DONE

    @pytest.mark.req("CC-059")
    def test_the_last_start_before_poison_is_alone_in_its_process(self) -> None:
        """Beside another inbox of the process, whose event could be the killer."""
        promised = effectful(poison_after=2)
        with (
            self.inbox(promised) as inbox,
            self.another(inbox) as beside,
            Held() as neighbor,
            Held() as suspect,
            Held() as latecomer,
        ):
            self.crash(inbox, promised, event("suspect"))
            neighbor.begin(beside.process, promised, event("neighbor"), staying(neighbor)).until_inside()
            suspect.begin(inbox.process, promised, event("suspect"), staying(suspect))
            until(lambda: everyone.waiting)
            assert self.ledger(inbox)["suspect"] == (1, 0), "it waits, and a crash now does not count"
            latecomer.begin(beside.process, promised, event("latecomer"), staying(latecomer))
            until(lambda: "latecomer" in self.ledger(inbox))
            assert not suspect.is_inside
            neighbor.release()
            suspect.until_inside()
            assert self.ledger(inbox)["suspect"] == (2, 0)
            assert not latecomer.is_inside, "beside the suspect"
            for each in (neighbor, suspect, latecomer):
                assert each.end().handling is Handling.DONE

    @pytest.mark.req("CC-059")
    def test_if_the_first_crash_makes_poison_each_event_is_alone(self) -> None:
        promised = effectful(poison_after=1)
        with self.inbox(promised) as inbox, Held() as first, Held() as second:
            first.begin(inbox.process, promised, event("first"), staying(first)).until_inside()
            second.begin(inbox.process, promised, event("second"), staying(second))
            until(lambda: everyone.waiting)
            assert "second" not in self.ledger(inbox)
            for each in (first, second):
                assert each.end().handling is Handling.DONE

    @pytest.mark.req("CC-059")
    def test_a_handler_that_processes_another_event_does_not_wait_for_itself(self) -> None:
        outer, inner = effectful("outer"), effectful("inner", poison_after=2)
        with self.inbox(outer, inner) as inbox, self.another(inbox) as beside:
            self.crash(beside, inner, event("suspect"))

            def handle(_: Any, __: Any) -> None:
                assert beside.process(inner, event("suspect"), write).handling is Handling.DONE

            assert inbox.process(outer, event("e1"), handle).handling is Handling.DONE

    @pytest.mark.req("CC-051")
    def test_a_suspect_that_fails_lets_the_others_in_again(self) -> None:
        promised = effectful()
        with self.inbox(promised) as inbox:
            self.crash(inbox, promised, event("suspect"))
            with pytest.raises(RuntimeError):
                inbox.process(promised, event("suspect"), raising(RuntimeError()))
            self.crash(inbox, promised, event("suspect"), raising(Killed()))
            assert inbox.process(promised, event("other"), write).handling is Handling.DONE

    def ledger(self, inbox: InboxDriver) -> dict[str, tuple[int, int]]:
        """Starts and ends of each event."""
        rows = inbox.rows("SELECT tracking_id, starts, ends FROM onceward_attempts")
        return {row["tracking_id"]: (row["starts"], row["ends"]) for row in rows}


class failing:
    """Within the block, every statement that contains this text fails."""

    def __init__(self, inbox: InboxDriver, text: str) -> None:
        self._engine = inbox.plain_engine
        self._text = text

    def __enter__(self) -> None:
        sqlalchemy_event.listen(self._engine, "before_cursor_execute", self._refuse)

    def __exit__(self, *_: object) -> None:
        sqlalchemy_event.remove(self._engine, "before_cursor_execute", self._refuse)

    def _refuse(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if self._text in statement:
            raise RuntimeError("the database is away")

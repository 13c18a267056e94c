"""The dedup row and the handler's writes commit or roll back together."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy.exc import DBAPIError, IntegrityError

from onceward.db import SessionError
from onceward.errors import ConfigurationError
from onceward.inbox import Event, Handling
from onceward.testing.inbox.samples import Killed, contract, event, never, write, write_then
from onceward.testing.inbox.suite import InboxSuite


def _raise(error: BaseException) -> Any:
    raise error


class Atomicity(InboxSuite):
    @pytest.mark.req("CC-012")
    def test_a_handler_that_raises_after_writing_leaves_nothing_and_runs_again(self) -> None:
        billing, paid = contract(), event()
        with self.inbox() as inbox:
            for _ in range(5):
                with pytest.raises(RuntimeError, match="half way"):
                    inbox.process(billing, paid, write_then(lambda: _raise(RuntimeError("half way"))))
                assert self.written(inbox) == []
                assert inbox.rows("SELECT * FROM onceward_dedup") == []
            assert inbox.process(billing, paid, write).handling is Handling.DONE
            assert self.written(inbox) == [paid.tracking_id]

    @pytest.mark.req("CC-012")
    def test_what_is_no_exception_but_ends_the_handler_leaves_nothing_either(self) -> None:
        billing, paid = contract(), event()
        with self.inbox() as inbox:
            self.crash(inbox, billing, paid, write_then(lambda: _raise(Killed())))
            assert self.written(inbox) == []
            assert inbox.process(billing, paid, write).handling is Handling.DONE
            assert self.written(inbox) == [paid.tracking_id]

    @pytest.mark.req("CC-012")
    @pytest.mark.parametrize("mode", ["transactional", "effectful"])
    def test_a_commit_that_fails_takes_both_back(self, mode: str) -> None:
        billing, paid = contract(mode=mode), event()
        with self.inbox(billing) as inbox:
            armed: list[bool] = []

            def fail(connection: Any) -> None:
                if armed:
                    armed.clear()
                    raise RuntimeError("the disk is full")

            sqlalchemy_event.listen(inbox.plain_engine, "commit", fail)
            with pytest.raises(RuntimeError, match="the disk is full"):
                inbox.process(billing, paid, write_then(lambda: armed.append(True)))
            assert self.written(inbox) == []
            assert inbox.rows("SELECT * FROM onceward_dedup") == []
            assert inbox.process(billing, paid, write).handling is Handling.DONE
            assert self.written(inbox) == [paid.tracking_id]

    @pytest.mark.req("CC-012")
    @pytest.mark.parametrize("mode", ["transactional", "effectful"])
    def test_an_error_of_the_database_that_the_handler_catches_does_not_commit_half(self, mode: str) -> None:
        billing, paid = contract(mode=mode), event()
        with self.inbox(billing) as inbox:

            def swallow(event: Event, session: Any) -> None:
                write(event, session)
                try:
                    session.execute("INSERT INTO written (tracking_id) VALUES (NULL)")
                except IntegrityError:
                    return

            # If the database allows statements after an error, everything else commits; otherwise nothing does.
            try:
                done = inbox.process(billing, paid, swallow).handling is Handling.DONE
            except (SessionError, DBAPIError):
                done = False
            assert self.written(inbox) == ([paid.tracking_id] if done else [])
            assert len(inbox.rows("SELECT * FROM onceward_dedup")) == int(done)

    @pytest.mark.req("CC-012")
    @pytest.mark.parametrize("mode", ["transactional", "effectful"])
    def test_every_attempt_has_a_new_session_and_the_old_one_is_refused(self, mode: str) -> None:
        billing, paid = contract(mode=mode), event()
        with self.inbox(billing) as inbox:
            sessions: list[Any] = []

            def fail(event: Event, session: Any) -> None:
                sessions.append(session)
                write(event, session)
                raise RuntimeError("again")

            for _ in range(2):
                with pytest.raises(RuntimeError, match="again"):
                    inbox.process(billing, paid, fail)
            inbox.process(billing, paid, lambda _, session: sessions.append(session))
            assert len({id(getattr(session, "_session", session)) for session in sessions}) == 3
            for session in sessions:
                with pytest.raises(SessionError, match="ended"):
                    write(paid, session)
            assert self.written(inbox) == []

    def test_the_handler_gets_the_event_by_both_its_arguments(self) -> None:
        with self.inbox() as inbox:
            paid = event(aggregate_id="order-1", sequence=3, payload={"amount": 7})
            seen: list[Event] = []
            inbox.process(contract(), paid, lambda given, session: seen.extend((given, session.event)))
            assert [each.tracking_id for each in seen] == [paid.tracking_id] * 2
            assert (seen[0].aggregate_id, seen[0].sequence, seen[0].payload) == ("order-1", 3, {"amount": 7})
            assert seen[0].lock_token is not None

    @pytest.mark.req("CC-032")
    def test_what_the_handler_raises_is_raised_as_the_very_object(self) -> None:
        with self.inbox() as inbox:
            error = LookupError("who")
            with pytest.raises(LookupError) as raised:
                inbox.process(contract(), event(), lambda *_: _raise(error))
            assert raised.value is error

    def test_an_event_whose_handler_was_of_the_wrong_kind_is_not_lost(self) -> None:
        """Its code would not run, and committing would lose the event."""
        paid = event()
        with self.inbox() as inbox:
            if not inbox.asynchronous:

                async def handle(*_: Any) -> None: ...

                with pytest.raises(ConfigurationError, match="is `async def`, but it runs in threads"):
                    inbox.process(contract(), paid, handle)
                with pytest.raises(TypeError, match="returned a coroutine, so its code has not run"):
                    inbox.process(contract(), paid, lambda *_: handle())
            assert inbox.process(contract(), paid, write).handling is Handling.DONE
            assert inbox.process(contract(), paid, never).duplicate

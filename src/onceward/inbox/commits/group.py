"""Group commit: several events of one consumer in one transaction, each in a part of its own with its own dedup row.

One commit decides them all. If it fails, none of them has happened, and the engine makes each attempt again, alone: a
neighbor can delay an event, but not fail it. What cannot be done inside a transaction that belongs to
others too, such as recording a start or parking an event, also makes an event run alone.

    first event ─► gate, BEGIN ─► handler ─┬─► next event: SAVEPOINT ─► handler ─┬─► … ─► COMMIT ─► all done
                                           └─ failed: ROLLBACK                   └─ failed: ROLLBACK TO, and COMMIT
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from onceward._text import driver_message
from onceward.db.transaction import regardless
from onceward.errors import ConfigurationError
from onceward.inbox.attempts import Company
from onceward.inbox.commits.attempt import EventAttempt
from onceward.inbox.errors import Busy
from onceward.inbox.result import Result
from onceward.inbox.sequences import OutOfTurn
from onceward.inbox.sessions.acknowledgment import take_off_together
from onceward.inbox.stores.types import MissingDay
from onceward.task.lifecycle import text_of
from onceward.telemetry.context import CurrentWork, attempt_expired, current_work
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.inbox.contract import Contract
    from onceward.inbox.processor import EventProcessor

_log = OwnLogger(logging.getLogger("onceward.inbox"))

Commit = Literal["group", "each"]
COMMITS: Final = ("group", "each")
BY_DEFAULT: Final[dict[str, Commit]] = {"sqlite": "group"}
"""How events are committed on each database, if the consumer does not say. Where writers do not wait for each other
anyway, a group would hold their locks for longer."""


def commit_of(consumer: Any, contract: Contract, database: str) -> str:
    """How the events of a consumer, its class or its task are committed: `group`, `each`, or `batch` by its handler."""
    given = getattr(consumer, "commit", None)
    if contract.mode == "effectful":
        return "each"
    if getattr(consumer, "takes_batches", False):
        return "batch"
    return given or BY_DEFAULT.get(database, "each")


def check_commit(given: Any, contract: Contract | None, consumer: str) -> None:
    """Refuse what is not a way to commit, or cannot work with the contract."""
    if given is None:
        return
    if given not in COMMITS:
        raise ConfigurationError(
            f"{consumer}: commit must be 'group' (events that wait together share a commit) or 'each' (one commit per "
            f"event), not {given!r}"
        )
    if given == "group" and contract is None:
        raise ConfigurationError(
            f"{consumer} has commit='group' but no contract, so nothing of it is committed; pass contract=Contract(…), "
            "or leave `commit` out"
        )
    if given == "group" and contract is not None and contract.mode == "effectful":
        raise ConfigurationError(
            f"{consumer} has commit='group', but its contract says mode='effectful': an outside call cannot be undone "
            "with its neighbors, so its events are committed one by one. Leave `commit` out"
        )


class FailedMember(NamedTuple):
    """An attempt that failed in a group, and how."""

    attempt: EventAttempt
    error: BaseException
    transaction: Transaction
    work: CurrentWork | None
    own: bool
    """Whether it failed whatever becomes of its neighbors: its time ran out, or it asked to exit."""


class GroupCommits:
    """The groups of one call of one consumer."""

    batches = False

    def __init__(self, processor: EventProcessor, expected: dict[int, Any]) -> None:
        self.at_once = processor.store.groups_at_once
        self._processor = processor
        self._expected = expected

    def unit(self) -> CommitGroup:
        return CommitGroup(self._processor, self._expected)


class CommitGroup:
    """Attempts that one commit decides. Used by one worker at a time."""

    def __init__(self, processor: EventProcessor, expected: dict[int, Any]) -> None:
        self._processor = processor
        self._expected = expected
        """The recorded starts, by the identity of their transaction. They stay until the group is decided."""
        self.size = processor.store.group_size
        self.closed = False
        self.seconds = 0.0
        self._whole: Any = None
        self._in_gate = False
        self._members: list[Transaction] = []
        self._kept: list[tuple[EventAttempt, Result]] = []
        self._failure: FailedMember | None = None
        self._problem: BaseException | None = None
        """Why it must not be committed."""
        self._alone: Transaction | None = None
        self._committed = False

    def repeats(self, transaction: Transaction) -> bool:
        if self._committed:
            return transaction is self._alone
        return self._failure is None or not self._failure.own or transaction is not self._failure.transaction

    def leave_out(self, transaction: Transaction) -> Busy:
        """This attempt is to be made alone, once the group is decided. Returns what to raise meanwhile."""
        self.closed = True
        self._alone = transaction
        return Busy("it is done alone, after a group", delay=0.0)

    async def run(self, attempt: EventAttempt, transaction: Transaction) -> Result:
        """Make the attempt in a part of the group's transaction. What it returns holds once the group has decided."""
        processor = self._processor
        if attempt.departure is not None:
            attempt.departure.wait()
        try:
            attempt.check()
            assert attempt.start is not None
            attempt.prepare(attempt.start)
            if self._whole is None:
                await self._open()
            result = await self._in_part(attempt)
        except (OutOfTurn, MissingDay, Busy) as error:
            raise self.leave_out(transaction) from error
        except BaseException as error:
            self.closed = True
            if processor.is_serialization_failure(error):
                self._problem = error
            own = attempt_expired() or not isinstance(error, Exception)
            self._failure = FailedMember(attempt, error, transaction, current_work.get(), own)
            self._members.append(transaction)
            raise
        self._members.append(transaction)
        self._kept.append((attempt, result))
        return result

    async def _open(self) -> None:
        """Enter the gate and begin the transaction. It belongs to no attempt: none of their time limits ends it."""
        processor, gate = self._processor, self._processor.ports.gate
        nested = gate.is_inside()
        await processor.enter(Company.ALL)
        gate.step_back()
        self._in_gate = not nested
        try:
            whole = processor.ports.whole()
            with regardless():
                await processor.reachable(whole.enter)
            self._whole = whole
        except BaseException:
            self._leave_gate()
            raise

    def _leave_gate(self) -> None:
        if self._in_gate:
            self._in_gate = False
            self._processor.ports.gate.let_out()

    async def _in_part(self, attempt: EventAttempt) -> Result:
        error: BaseException | None = None
        ports = self._processor.ports
        session: Any = ports.part(self._whole, len(self._kept))
        session.event = attempt.event
        port = session.port
        began = time.perf_counter()
        port.open_part()
        ports.gate.step_in()
        try:
            # The first looks for its open dead letter at once; one statement before the commit does for the others.
            return await self._processor.in_transaction(attempt, session, letters=not self._kept)
        except BaseException as raised:
            error = raised
            raise
        finally:
            ports.gate.step_back()
            self.seconds += time.perf_counter() - began
            if not port.end_at_once(error):
                await port.leave(error)

    async def decide(self) -> None:
        """Commit. If that fails, nothing of the group has happened."""
        self._committed = self._whole is None or await self._commit()
        if self._committed:
            for transaction in self._members:
                self._expected.pop(id(transaction), None)
            for attempt, result in self._kept:
                if attempt.departure is not None:
                    attempt.departure.committed()
                self._processor.done(attempt, result)
        if self._failure is not None and (self._committed or self._failure.own):
            await self._record(self._failure)

    async def _record(self, failure: FailedMember) -> None:
        self._expected.pop(id(failure.transaction), None)
        token = current_work.set(failure.work)  # log lines are of its attempt
        try:
            await self._processor.failed(failure.attempt, failure.error)
        finally:
            current_work.reset(token)

    async def _commit(self) -> bool:
        whole, self._whole = self._whole, None
        problem = self._problem
        try:
            if problem is None and self._kept:
                problem = await self._finish(whole)
                await whole.leave(problem)
            else:
                await whole.leave(problem or _given_up())
        except Exception as error:  # noqa: BLE001  logged, and each attempt is made again
            problem = error
        finally:
            self._leave_gate()
        if problem is None:
            return True
        _log.info(
            "%d events could not be committed together and are done one by one: %s",
            len(self._members),
            driver_message(problem) if isinstance(problem, Exception) else text_of(problem),
        )
        return False

    async def _finish(self, whole: Any) -> Exception | None:
        """Do for all what is left to do before the commit. An error is as if the commit had failed."""
        apply = self._processor.ports.apply
        admitted = [attempt for attempt, result in self._kept[1:] if not result.duplicate]
        leaving = [
            (attempt.departure, attempt.key, not result.duplicate)
            for attempt, result in self._kept
            if attempt.departure is not None
        ]
        try:
            if admitted:
                await apply(whole, self._processor.resolve_letters, admitted)
            if leaving:
                await apply(whole, take_off_together, leaving)
        except Exception as error:  # noqa: BLE001
            return error
        return None

    async def abandon(self) -> None:
        self._problem = self._problem or _given_up()
        if self._whole is not None:
            await self._commit()
        if self._failure is not None and self._failure.own:
            await self._record(self._failure)


def _given_up() -> Busy:
    return Busy("the group was given up", delay=0.0)

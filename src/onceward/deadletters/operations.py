"""The operations of a dead-letter store, shared by threads and asyncio, and how a letter gets into it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from onceward._ids import same_id
from onceward.connectors.leased_deliveries import Held
from onceward.db.transaction import DbTransaction
from onceward.deadletters import alerts, edits, queries, redrive_leases, root_causes
from onceward.deadletters.burial import Burial
from onceward.deadletters.burial_rows import Buried, bury
from onceward.deadletters.edits import Draft, EditRefusedError
from onceward.deadletters.groups import LetterGroup, groups
from onceward.deadletters.letter import DeadLetter
from onceward.deadletters.queries import Filter
from onceward.deadletters.redrive import Redrive, explain_no_match, redrive, redrives, stop
from onceward.deadletters.redrive_leases import Redelivery
from onceward.deadletters.root_causes import Rca
from onceward.errors import ConfigurationError, NotFoundError
from onceward.inbox.errors import IN_A_MOMENT, Busy
from onceward.inbox.stores import store_of
from onceward.inbox.stores.types import Key
from onceward.storage import audit, migrations
from onceward.storage.audit import AuditVerdict
from onceward.storage.database import Sql, StoragePorts, check_tables
from onceward.telemetry.logger import OwnLogger
from onceward.telemetry.redaction import redact
from onceward.transaction import Settlement, Verdict

if TYPE_CHECKING:
    from onceward.deadletters.dry_run import Prediction

_log = OwnLogger(logging.getLogger("onceward.deadletters"))

PURGE_STEP = 1000
FEW_LETTERS = 10_000
"""So many may be removed at once, even if they are all there are."""
BURIAL_RETRIES = 200
"""How often burying waits a moment for an event that is in flight."""

T = TypeVar("T")


class DeadLetterOperations:
    """Runs each operation in one transaction. With blocking ports the coroutines never suspend (`onceward._sync`)."""

    def __init__(self, ports: StoragePorts, clock: Callable[[], float] | None) -> None:
        self.ports = ports
        self._store = store_of(ports.dialect, clock)
        self._rows = Sql(ports.dialect.name, clock)
        self._alerts = alerts.Alerts()
        self._checked = False
        self.owner: str | None = None
        """The process that the leases of redriven letters belong to."""

    async def _transact(self, operation: Callable[..., T], *args: Any) -> T:
        await self._check_tables()
        return await self.ports.transact(operation, *args)

    async def _look(self, operation: Callable[..., T], *args: Any) -> T:
        await self._check_tables()
        return await self.ports.look(operation, *args)

    async def _check_tables(self) -> None:
        if not self._checked:  # its error says how to create missing tables
            await self.ports.look(check_tables, self._store)
            self._checked = True

    async def migrate(self) -> list[str]:
        return await self.ports.transact(migrations.apply, self._store)

    async def bury(self, burials: Sequence[Burial]) -> int:
        """Store these, all or none, durable when this returns. Return how many deaths were new.

        An event that its inbox has done is not buried. Raises `Busy`, and stores none, if one is being done right now.
        """
        for _ in range(BURIAL_RETRIES):
            try:
                return await self._bury(burials)
            except Busy as busy:  # another process may bury the same
                await self.ports.sleep(busy.delay)
        return await self._bury(burials)

    async def _bury(self, burials: Sequence[Burial]) -> int:
        def bury_all(transaction: DbTransaction) -> list[alerts.Buried]:
            buried = bury(transaction, self._rows, self._store, burials, all_or_none=True)
            for busy in buried.in_flight:
                raise Busy(
                    f"message {busy.message_id} of {busy.consumer} is being processed right now, so "
                    "whether it is dead is not known yet; bury it again later",
                    delay=IN_A_MOMENT.delay(),
                )
            return buried.fresh

        buried = await self._transact(bury_all)
        self._alerts.send(buried)
        return len(buried)

    async def take_over(self, burials: Sequence[Burial]) -> Buried:
        """Store these, except those that their source must keep for now, because they are being processed, and those
        that are done."""
        buried: Buried = await self._transact(bury, self._rows, self._store, burials)
        self._alerts.send(buried.fresh)
        return buried

    async def find(self, wanted: Filter, limit: int, after: int = 0) -> list[DeadLetter]:
        return await self._look(queries.find, self._rows, wanted, limit, after)

    async def count(self, wanted: Filter) -> int:
        return await self._look(queries.count, self._rows, wanted)

    async def tally(self, wanted: Filter) -> list[queries.LettersInState]:
        return await self._look(queries.tally, self._rows, wanted)

    async def hold_of(self, letter_id: int) -> queries.LetterHold | None:
        return await self._look(queries.hold_of, self._rows, letter_id)

    async def body(self, letter_id: int) -> bytes:
        body = await self._look(queries.body, self._rows, letter_id)
        if body is None:
            raise NotFoundError(f"there is no dead letter {letter_id}; see `onceward dlq list`")
        return body

    async def edited_body(self, letter_id: int) -> bytes | None:
        return await self._look(queries.edited_body, self._rows, letter_id)

    async def groups(self, wanted: Filter) -> list[LetterGroup]:
        return await self._look(groups, self._rows, wanted)

    async def draft(self, letter_id: int) -> Draft:
        """Return a letter to edit or to try."""
        found = await self.find(Filter(ids=(letter_id,)), 1)
        draft = await self._look(edits.read, self._rows, found[0]) if found else None
        if draft is None:
            raise NotFoundError(f"there is no dead letter {letter_id}; see `onceward dlq list`")
        return draft

    async def edit(
        self, letter_id: int, payload: Any, task: Any, cause: str, operator: str
    ) -> Prediction | None:
        from onceward.deadletters.dry_run import predict

        audit.check_operator(operator)
        edits.check_cause(cause)
        draft = await self.draft(letter_id)
        edits.check(draft.letter)
        body = draft.with_payload(payload)
        if not draft.changes(body):
            return None
        engine: Any = self.ports.engine  # type: ignore[attr-defined]
        (prediction,) = await predict(engine, task, [draft.transaction(body)], draft.letter.consumer)
        await self.store_edit(draft, body, cause, operator, prediction)
        return prediction

    async def store_edit(
        self, draft: Draft, body: bytes, cause: str, operator: str, prediction: Prediction
    ) -> None:
        """Store an edit, unless its dry run failed or the letter has changed since it was read."""
        if not prediction.is_good:
            raise EditRefusedError(
                f"dead letter {draft.letter.id} would die again with this payload: {prediction.detail}"
            )
        outcome = str(prediction.outcome)
        await self._transact(edits.store, self._rows, draft, body, cause, operator, outcome)

    async def redrive(
        self,
        wanted: Filter,
        rca: Rca | int,
        rate: int,
        operator: str,
        redrive_id: str | None,
        poison_fixed: bool = False,
    ) -> Redrive:
        return await self._transact(
            redrive, self._rows, wanted, rca, rate, operator, redrive_id, poison_fixed
        )

    async def stop_redrive(self, redrive_id: str, reason: str, operator: str) -> int:
        return await self._transact(stop, self._rows, redrive_id, reason, operator)

    async def explain_no_match(self, wanted: Filter) -> str:
        return await self._look(explain_no_match, self._rows, wanted)

    async def redrives(self, limit: int) -> list[dict[str, Any]]:
        return await self._look(redrives, self._rows, limit)

    async def rcas(self, limit: int) -> list[dict[str, Any]]:
        return await self._look(root_causes.last, self._rows, limit)

    async def discard(self, wanted: Filter, reason: str, operator: str) -> int:
        return await self._run_with_audit(operator, "discard", wanted, reason, queries.discard, wanted)

    async def hold(self, wanted: Filter, reason: str, operator: str) -> int:
        return await self._run_with_audit(operator, "hold", wanted, reason, queries.hold, wanted, reason)

    async def release(self, wanted: Filter, reason: str, operator: str) -> int:
        return await self._run_with_audit(operator, "release", wanted, reason, queries.release, wanted)

    async def effects_of(self, consumer: str, tracking_id: str) -> list[dict[str, Any]]:
        """The outside calls of an event, the first that was begun first."""
        spellings = sorted({tracking_id, same_id(tracking_id)})
        return await self._look(self._store.effects_of, consumer, spellings)

    async def resolve_effect(
        self,
        consumer: str,
        tracking_id: str,
        name: str,
        happened: bool,
        result: Any,
        reason: str,
        operator: str,
    ) -> None:
        audit.check_operator(operator)
        if not reason or not reason.strip():
            raise ConfigurationError("give a reason: how it is known whether the effect has happened")
        event = Key(consumer, same_id(tracking_id), 0)

        def resolve(transaction: DbTransaction) -> None:
            # A migration leaves an effect in another spelling as it was if the event has two of that name.
            given = event._replace(tracking_id=tracking_id)
            key = event if self._store.effect(transaction, given, name) is None else given
            attempts = self._store.attempts(transaction, event, lock=True)
            effect = self._store.effect(transaction, key, name)
            if effect is None or effect.state != "intended":
                found = "there is no such effect" if effect is None else f"it is {effect.state}"
                raise ConfigurationError(
                    f"effect {name!r} of event {tracking_id} of {consumer} is not in doubt: {found}; see "
                    "`onceward inbox effects`"
                )
            if attempts.locked:
                raise ConfigurationError(
                    f"event {tracking_id} of {consumer} is in flight, and may be calling effect {name!r} right now; "
                    f"try again in {attempts.locked_for:.0f} s"
                )
            if happened:
                self._store.settle_effect(transaction, key, name, msgspec.msgpack.encode(result))
            else:
                self._store.refuse_effect(transaction, key, name, effect.key, f"{operator}: {reason}")
            details = {
                "consumer": consumer,
                "tracking_id": tracking_id,
                "effect": name,
                "key": effect.key,
                "happened": happened,
                "reason": reason,
            }
            audit.note(transaction, self._rows, operator, "resolve_effect", details)

        await self._transact(resolve)

    async def _run_with_audit(
        self,
        operator: str,
        action: str,
        wanted: Filter,
        reason: str,
        operation: Callable[..., int],
        *args: Any,
    ) -> int:
        audit.check_operator(operator)
        if not reason or not reason.strip():
            raise ConfigurationError(f"give a reason to {action} dead letters")
        queries.check(wanted, action)

        def do(transaction: DbTransaction) -> int:
            letters = operation(transaction, self._rows, *args)
            details = {"filter": wanted.as_dict(), "reason": reason, "letters": letters}
            audit.note(transaction, self._rows, operator, action, details)
            return letters

        return await self._transact(do)

    async def purge(self, operator: str, *, trust_clock: bool = False) -> int:
        """Remove settled letters that need not be kept any longer, in small steps, each with its line in the audit.

        Return how many. One call removes at most half of all letters, unless there are few, or `trust_clock` is set.
        """
        audit.check_operator(operator)

        def step(transaction: DbTransaction) -> int:
            self._rows.check_clock(transaction, "onceward dlq purge", trust=trust_clock and not total)
            removed = queries.purge(transaction, self._rows, PURGE_STEP)
            if removed or not total:
                audit.note(transaction, self._rows, operator, "purge", {"letters": removed})
            return removed

        total, at_most = 0, inf
        if not trust_clock:
            every = await self._look(queries.count, self._rows, Filter())
            at_most = max(FEW_LETTERS, every // 2)
        while removed := await self._transact(step):
            total += removed
            if total >= at_most:
                _log.warning("half of all dead letters were removed; purge again to remove what is left")
                break
        return total

    async def stats(self) -> list[dict[str, Any]]:
        return await self._look(queries.stats, self._rows)

    async def note(self, operator: str, action: str, details: dict[str, Any]) -> None:
        """Add a line to the audit about an action that changes nothing here."""
        await self._transact(audit.note, self._rows, operator, action, details)

    async def audit(self, limit: int, before: int | None = None) -> list[dict[str, Any]]:
        return await self._look(audit.entries, self._rows, limit, before)

    async def verify_audit(self) -> AuditVerdict:
        return await self._look(audit.verify, self._rows)

    # ── redelivery, for `WithDeadLetters` ───────────────────────────────────────────────────────────────

    async def deliver(self, consumer: str, size: int, lease: float) -> list[Redelivery]:
        """Lease the redriven letters that are due."""
        delivered, deaths = await self._transact(
            self._store.limited(redrive_leases.deliver),
            self._rows,
            self._store,
            consumer,
            size,
            lease,
            self.owner,
        )
        for message_id, outcome, error in deaths:
            alerts.report_redriven(consumer, message_id, outcome, error)
        return delivered

    async def settle(self, consumer: str, endings: Sequence[tuple[Held, Settlement]]) -> list[Held]:
        """End these deliveries, all or none. Return those whose lease was lost."""
        settle = self._store.limited(redrive_leases.settle)
        settled = await self._transact(settle, self._rows, self._store, consumer, endings)
        lost = []
        for message_id, (held, settlement) in zip(settled, endings, strict=True):
            if message_id is None:
                lost.append(held)
            elif settlement.verdict != Verdict.RETURNED:
                outcome = "succeeded" if settlement.verdict == Verdict.DONE else "died_again"
                error = "" if settlement.error is None else redact(str(settlement.error))
                alerts.report_redriven(consumer, message_id, outcome, error)
        return lost

    async def extend(self, deliveries: Sequence[Held], lease: float) -> list[Held]:
        """Keep these for another lease. Return those whose lease was lost."""
        extend = self._store.limited(redrive_leases.extend)
        return await self._transact(extend, self._rows, deliveries, lease)

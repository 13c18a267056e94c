"""A limited source: it passes on what may start now, and lets the rest wait here, or in the source itself.

The loop asks the database for starts, for several messages and keys at once, and not before there may be one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import ceil, inf
from typing import Any, Final

from onceward._process.stop import engine_stop
from onceward.limits.limit import KeyProblem
from onceward.limits.limiter import LATE, Limiter, Queued, Started
from onceward.limits.records import LEASE, KeyState, Wish
from onceward.limits.slots import SlotKeeper
from onceward.middleware import Middleware, SourceCalls, StepCall, StepInfo
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.telemetry.context import current_work
from onceward.transaction import Settlement, Transaction, Verdict

LOOK: Final = 0.25
"""Seconds until the database is asked again for a slot that another process has."""
NEWS: Final = 0.25
"""Seconds until the source is asked again, where its news and the end of a handler cannot both be heard."""
PATIENCE: Final = 5.0
"""Seconds, or three times its pace, that a message waits here before another process may have it."""
FULL: Final = 0.02
"""Seconds until the next try after all that may be reserved is."""
SWEEP: Final = 60.0
"""Seconds between two removals of keys that nobody uses."""
CHORE: Final = 1.0
"""Seconds that a fetch may take while something runs: the loop has other things to do."""


class LimitedSource(Middleware):
    """Passes on what may start now, and lets the rest wait."""

    name = "limit of the source"

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._records = limiter.records
        self._source: SourceCalls
        self._asynchronous = False
        self._over = True
        self._still = False
        self._keeper = SlotKeeper(limiter)
        self._window = 1
        """How many starts of a rate to hold at once. It grows until they come too late."""
        self._size = 1
        self._extended_at = 0.0
        self._keyed = limiter.keys.keyed
        self._paces: dict[str, float] = {}
        """Seconds from one start to the next of each key that waits."""
        self._asked_at = 0.0
        self._swept_at = 0.0
        self._back_at = -inf
        """When the last of the messages that were given back comes again."""

    def bind(self, task: Any) -> Middleware:
        self._now = task.clock.now
        self._still = self._records.exact = task.clock.stands_still
        self._asynchronous = task.asynchronous
        self._keeper.bind(task)
        return self

    async def begin(self) -> None:
        await self._records.begin()
        self._swept_at = self._now()
        self._over = False

    async def end(self) -> None:
        """Give back all that waits, and every slot whose handler has ended."""
        limiter = self._limiter
        self._over = True
        try:
            await self.let_go()
        finally:
            with limiter.lock:
                freed = limiter.take_freed()
                # What still runs keeps its slot until its lease ends.
                limiter.running.clear()
                limiter.leases.clear()
                limiter.problems.clear()
            if freed:
                await self._records.free({token: each.seconds for token, each in freed.items()})
            await self._keeper.end()

    async def let_go(self) -> None:
        """Give back what has not started: nothing starts for a while."""
        limiter, now = self._limiter, self._now()
        with limiter.lock:
            left = [
                (each.transaction, max(limiter.look_at.get(key, now) - now, 0.0) if self._still else 0.0)
                for key, line in limiter.waiting.items()
                for each in line
            ]
            left += [(each.transaction, 0.0) for each in limiter.reserved]
            for each in limiter.reserved:
                if each.token is not None:
                    limiter.free(each.token, each.key, now)
            limiter.waiting.clear()
            limiter.reserved.clear()
            for key in list(limiter.spare):
                limiter.free_spares(key, now)
        limiter.bell.ring()
        await self._give_back(left)

    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        if step.name != "process":
            return call
        problems = self._limiter.problems

        async def process(given: Any, *more: Any) -> Any:
            if problems:
                for each in given if isinstance(given, list) else (given,):
                    if found := problems.get(each.id):
                        raise TransactionException(str(found[0]), ExceptionCategory.BUSINESS) from found[0]
            return await call(given, *more)

        return process

    def wrap_source(self, source: SourceCalls) -> SourceCalls:
        self._source = source
        limiter = self._limiter

        async def fetch(size: int, **extra: Any) -> Sequence[Transaction]:
            began = self._now()
            while True:
                started = await self._round(size, extra)
                if started or not self._insists(began):
                    return started
                await self._sleep(min(self._next() - self._now(), NEWS))

        async def settle(settlements: Sequence[Settlement]) -> None:
            assert source.settle is not None
            await source.settle(settlements)
            now = self._now()
            for settlement in settlements:
                limiter.end(settlement.transaction, now)
                if limiter.problems:
                    self._forget_problem(settlement.transaction)

        async def extend(transactions: Sequence[Transaction]) -> None:
            assert source.extend is not None
            self._extended_at = self._now()
            await source.extend([*transactions, *self._kept()])

        async def wait(seconds: float) -> bool:
            await self._extend_kept()
            if not self._kept() and source.wait is not None:
                return await source.wait(seconds)
            if self._room() <= 0:  # only the end of a handler helps
                await self._sleep(min(seconds, NEWS))
                return limiter.rang
            left = min(seconds, self._next() - self._now())
            ends = any(each.token for each in list(limiter.running.values()))
            hears = self._keyed and not ends and source.wait is not None
            if left > 0 and hears:
                assert source.wait is not None
                if await source.wait(left):
                    return True
            elif left > 0:
                await self._sleep(min(left, NEWS))
            now = self._now()
            # Otherwise the loop has other things to do, and comes back.
            return limiter.rang or self._next() <= now or (not hears and now - self._asked_at >= NEWS)

        return source.replace(
            fetch=fetch,
            settle=None if source.settle is None else settle,
            extend=None if source.extend is None else extend,
            wait=wait,
        )

    # ── one round: what is due starts, what waits asks ──────────────────────────────────────────────────

    async def _round(self, size: int, extra: dict[str, Any]) -> list[Transaction]:
        limiter = self._limiter
        limiter.rang = False
        self._size = size
        await self._extend_kept()
        self._note_ended()
        if self._keyed and self._now() - self._swept_at >= SWEEP:
            self._swept_at = self._now()
            await self._records.remove_idle()
        with limiter.lock:
            self._hand_over()
            if not limiter.waiting:
                limiter.look_at.clear()
                self._paces.clear()
        appetite = self._appetite(size)
        passed: list[Transaction] = []
        if appetite > 0:
            self._asked_at = self._now()
            fetched = await self._source.fetch(appetite, **extra) or ()
            passed = [each for each in fetched if not self._receive(each)]
        try:
            await self._ask()
        except BaseException:
            for each in passed:
                self._forget_problem(each)
            await self._give_back([(each, 0.0) for each in passed])
            await self.let_go()
            raise
        with limiter.lock:
            return passed + self._due(size - len(passed))

    def _note_ended(self) -> None:
        """Free the slots of what was decided together with others, before it is settled."""
        slots: Any = getattr(current_work.get(), "slots", None)
        ended: list[Transaction] = []
        with suppress(RuntimeError):  # more have ended meanwhile
            ended = [each.transaction for each in getattr(slots, "settled", None) or ()]
        if slots is not None and slots.pending <= 0:
            ended += [each.transaction for each in list(self._limiter.running.values())]
        for each in ended:
            self._limiter.end(each, self._now())

    def _receive(self, transaction: Transaction) -> bool:
        """Let it wait for its start. Returns False if it has no key, so it fails at once."""
        limiter = self._limiter
        try:
            key = limiter.keys.key_of(transaction.payload)
        except KeyProblem as problem:
            limiter.problems.setdefault(transaction.id, []).append(problem)
            return False
        with limiter.lock:
            limiter.waiting.setdefault(key, deque()).append(Queued(transaction, self._now()))
        return True

    def _forget_problem(self, transaction: Transaction) -> None:
        found = self._limiter.problems.get(transaction.id)
        if found:
            found.pop()
            if not found:
                del self._limiter.problems[transaction.id]

    def _room(self) -> int:
        """How many more the engine can start at once."""
        slots = getattr(current_work.get(), "slots", None)
        return (self._size if slots is None else slots.size) - len(self._limiter.running)

    def _appetite(self, size: int) -> int:
        """How many messages to fetch."""
        limiter, room = self._limiter, self._room()
        kept = sum(map(len, limiter.waiting.values()))
        if room <= 0 or kept + len(limiter.reserved) >= size:
            return 0
        if self._keyed or self._still:
            return size - kept - len(limiter.reserved)
        # Others have more use for what cannot start here soon.
        pace = self._paces.get("", self._records.pace)
        soon = ceil(self._records.ahead / pace) if pace else size
        if self._records.most:
            soon = min(soon, 4 * self._records.most)
        soon = max(min(soon, size - len(limiter.reserved)), 1)
        return soon - kept if kept <= soon // 2 else 0

    def _hand_over(self) -> None:
        """Give slots that are free to the next of their keys. Call it, and the next, with the lock."""
        limiter, now = self._limiter, self._now()
        for key in list(limiter.spare):
            line, tokens = limiter.waiting.get(key, ()), limiter.spare[key]
            while line and tokens and self._records.hands_over:
                token = tokens.popleft()
                if now <= limiter.leases.get(token, -inf):
                    self._reserve(key, now, token)
                    line = limiter.waiting.get(key, ())
                else:
                    limiter.free(token, key, now)
            limiter.free_spares(key, now)

    def _reserve(self, key: str, due: float, token: str | None) -> None:
        """The first that waits has its start."""
        limiter = self._limiter
        line = limiter.waiting[key]
        first = line.popleft()
        if not line:
            del limiter.waiting[key]
        limiter.reserved.append(Started(first.transaction, key, due, token, first.since))

    def _due(self, most: int) -> list[Transaction]:
        """Start what is due. What is too late waits again."""
        limiter, now = self._limiter, self._now()
        started: list[Transaction] = []
        later: list[Started] = []
        for run in sorted(limiter.reserved, key=lambda each: each.due):
            late = now > run.due + LATE and self._records.rated
            lost = run.token is not None and now > limiter.leases.get(run.token, -inf)
            if late or lost:
                self._window = max(self._window // 2, 1)
                if run.token is not None:
                    limiter.free(run.token, run.key, now)
                limiter.waiting.setdefault(run.key, deque()).appendleft(Queued(run.transaction, run.since))
                limiter.look_at.pop(run.key, None)
            elif run.due > now or len(started) >= most or self._room() <= 0:
                later.append(run)
            else:
                limiter.running[id(run.transaction)] = run
                started.append(run.transaction)
        limiter.reserved[:] = later
        return started

    async def _ask(self) -> None:
        """Ask the database for starts, where there may be some."""
        limiter, before = self._limiter, self._now()
        room = self._room() - len(limiter.reserved)
        if self._records.rated and not self._records.most:
            most = min(self._window, self._size)
            room = most - len(limiter.reserved)
            room = room if 2 * room >= most else 0  # for several at once
        with limiter.lock:
            wishes = {
                key: Wish(len(line), len(line))
                for key, line in limiter.waiting.items()
                if limiter.look_at.get(key, -inf) <= before or len(line) > self._soon(key)
            }
            crowded = any(wish.starts > self._soon(key) for key, wish in wishes.items())
            if room <= 0 and not crowded:
                limiter.look_at.update(dict.fromkeys(wishes, before + FULL))
                return
            if not wishes:
                return
            freed = limiter.take_freed()
        try:
            states = await self._records.take(
                wishes, room, {token: each.seconds for token, each in freed.items()}
            )
        except BaseException:
            with limiter.lock:
                limiter.freed.update(freed)
            raise
        returned: list[tuple[Transaction, float]] = []
        with limiter.lock:
            self._window = min(self._window * 2, self._size)
            for key, state in states.items():
                returned += self._note(key, state, before)
        if any(each.token for each in limiter.reserved):
            self._keeper.begin()
        await self._give_back(returned)

    def _soon(self, key: str) -> int:
        """How many of a key are worth keeping here."""
        pace = self._paces.get(key, self._records.pace)
        return max(1, ceil(1 / pace)) if pace else self._size

    def _note(self, key: str, state: KeyState, before: float) -> list[tuple[Transaction, float]]:
        """Reserve what was given out, and return what is given back, with its delays. Call it with the lock."""
        limiter, now = self._limiter, self._now()
        for grant in state.grants:
            if grant.token is not None:
                limiter.leases[grant.token] = before + grant.due_in + LEASE
            self._reserve(key, now + grant.due_in, grant.token)
        line = limiter.waiting.get(key)
        if line is None:
            limiter.look_at.pop(key, None)
            self._paces.pop(key, None)
            return []
        self._paces[key] = state.pace
        # In time, so none is lost; but not before it can be had.
        wait = max(state.next_in - self._records.ahead / 2, 0.01)
        if state.full and not limiter.rang:  # no handler has ended since the answer, here at least
            wait = max(wait, LOOK)
        limiter.look_at[key] = now + wait
        if self._source.settle is None:
            return []
        returned = [(line.pop().transaction, delay) for delay in reversed(state.returns)]
        longest = max(PATIENCE, 3 * state.pace)
        while line and now - line[0].since > longest:
            returned.append((line.popleft().transaction, min(state.pace, 1.0)))
        if not line:
            del limiter.waiting[key]
        return returned

    async def _give_back(self, returned: Sequence[tuple[Transaction, float]]) -> None:
        """Give messages back to the source, uncounted, with these delays."""
        if not returned or self._source.settle is None:
            return
        self._back_at = max(self._back_at, self._now() + max(delay for _, delay in returned))
        await self._source.settle(
            [Settlement(each, Verdict.RETURNED, delay=delay) for each, delay in returned]
        )

    # ── waiting ─────────────────────────────────────────────────────────────────────────────────────────

    def _kept(self) -> list[Transaction]:
        limiter = self._limiter
        with limiter.lock:
            kept = [each.transaction for line in limiter.waiting.values() for each in line]
            return kept + [each.transaction for each in limiter.reserved]

    def _next(self) -> float:
        """When something may start, or the database is to be asked."""
        limiter = self._limiter
        with limiter.lock:
            due = [each.due for each in limiter.reserved]
            due += [limiter.look_at.get(key, -inf) for key in limiter.waiting]
        return min(due, default=inf)

    def _insists(self, began: float) -> bool:
        """Whether an empty answer would be taken for an empty source, or for a reason to rest too long."""
        policy: Any = getattr(current_work.get(), "policy", None)
        if policy is None or (policy.streaming and "empty_queue" not in policy.model_fields_set):
            return False
        stop = engine_stop()
        if self._over or (stop is not None and stop.requested):
            return False
        if self._still:
            return (bool(self._limiter.running) or self._limiter.rang) and bool(self._kept())
        now = self._now()
        if not self._kept() and now > self._back_at + NEWS:
            return False
        return not self._limiter.running or now - began < CHORE

    async def _sleep(self, seconds: float) -> None:
        """Wait until something ends here, or so long."""
        await self._limiter.sleep(seconds, asynchronous=self._asynchronous, unless=lambda: self._limiter.rang)

    async def _extend_kept(self) -> None:
        """Extend the leases of deliveries that wait here. The engine does not know them."""
        now = self._now()
        if self._source.extend is None or now - self._extended_at < self._source.lease / 3:
            return
        self._extended_at = now
        if kept := self._kept():
            await self._source.extend(kept)

"""How the first attempt at a transaction begins in asyncio.

Most handlers of a worker have no time limit, and many do not wait for anything. So nothing of ours is around such an
attempt until it has to wait.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Generator
from math import inf
from types import CoroutineType, coroutine
from typing import Any, NamedTuple, cast

from onceward.task.deadlines import Deadlines, TaskTry, forget_token
from onceward.task.exceptions import AttemptInterrupted
from onceward.task.lifecycle import LifePorts, first_attempt
from onceward.task.script import DISOWNED, Failed, await_checked, failure_reply
from onceward.task.work import Life
from onceward.telemetry.context import current_attempt, current_work


class Opened(NamedTuple):
    """A first attempt that has to wait."""

    following: Any
    """What awaits the rest of it, and returns its reply."""
    awaited: Any
    """What it waits for."""


class AsyncFirstAttempts(ABC):
    """The part of the ports that begins first attempts."""

    alone = True
    interruptible: bool
    deadlines: Deadlines
    tries: dict[Any, Any]
    soiled: set[asyncio.Task[Any]]
    loop: asyncio.AbstractEventLoop

    @abstractmethod
    def is_cancelled(self, task: asyncio.Task[Any]) -> bool: ...
    @abstractmethod
    def failure_reply(self, error: BaseException) -> Failed: ...

    def make_try(self, life: Life) -> TaskTry:
        return TaskTry(life.limit, work=life, due=inf, task=life.driver)

    def open(self, life: Life) -> Any:
        """Begin the first attempt in the life's context. Returns its reply, or what to await for it: a coroutine, or
        `Opened`."""
        run, plan = life.context.run, life.plan
        if (
            self.interruptible
            and plan.plain
            and plan.main.timeout is None
            and not (life.blocked or self.soiled or self.deadlines.hurried)
        ):
            return run(self._open_unlimited, life)
        return run(first_attempt, life, cast(LifePorts, self))

    def _open_unlimited(self, life: Life) -> Any:
        """Begin an attempt that has no time limit but can be cut off: as `first_attempt`, without our own coroutine
        around the handler's."""
        task = asyncio.current_task(self.loop)
        assert task is not None
        current_work.set(life)
        step = life.plan.main
        life.step = step.name
        self.tries[task] = this = TaskTry(life.limit, work=life, due=inf, task=task)
        current_attempt.set(this)
        try:
            given = step.call(life.transaction)
        except BaseException as error:  # noqa: BLE001  an error of user code is a reply
            return self.conclude(this, None, error)
        this.awaited = given = given if type(given) is CoroutineType else await_checked(given, step.call)
        try:
            awaited = given.send(None)
        except StopIteration as end:
            return self.conclude(this, end.value, None)
        except BaseException as error:  # noqa: BLE001
            return self.conclude(this, None, error)
        return Opened(self.follow(this, given), awaited)

    def follow(self, this: TaskTry, given: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """What awaits what an attempt has begun to await, and returns the reply of the attempt."""
        following = self._follow(this, given)
        next(following)
        return following

    @coroutine
    def _follow(self, this: TaskTry, given: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Await what an attempt has begun to await, and return the reply of the attempt."""
        reply: Any = None
        awaited: Any = None
        failed: BaseException | None = None
        while True:
            thrown: BaseException | None = None
            try:
                value = yield awaited
            except BaseException as error:  # noqa: BLE001  pass on what the event loop throws
                thrown = error
            try:
                awaited = given.send(value) if thrown is None else given.throw(thrown)
            except StopIteration as end:
                reply = end.value
                break
            except BaseException as error:  # noqa: BLE001
                failed = error
                break
        return self.conclude(this, reply, failed)

    def conclude(self, this: TaskTry, reply: Any, error: BaseException | None) -> Any:
        """The reply of an attempt that has ended."""
        task = this.task
        del self.tries[task]
        this.over = True
        current_attempt.follow_work()
        forget_token(this)
        if this.stuck:
            return DISOWNED
        if this.expired:
            task.uncancel()
            if self.is_cancelled(task):
                raise asyncio.CancelledError
            if error is None or isinstance(error, (asyncio.CancelledError, AttemptInterrupted)):
                return Failed(None, this.limit, late=reply)
            return failure_reply(error, this.limit)
        return reply if error is None else self.failure_reply(error)

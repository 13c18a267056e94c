"""What groups need from the ports of a call in asyncio."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Coroutine, Generator
from types import CoroutineType, coroutine
from typing import Any

from onceward.task.attempts.first_attempts import AsyncFirstAttempts, Opened
from onceward.task.groups.together import STUCK
from onceward.task.groups.turns import AsyncTurns
from onceward.task.lifecycle import early_outcome
from onceward.task.script import DISOWNED, Closed, Exited, await_in_context, failure_reply
from onceward.task.work import Life


class AsyncGroupPorts(AsyncFirstAttempts):
    @abstractmethod
    def go_on(
        self, life: Life, opened: Coroutine[Any, Any, Any] | None, reply: Any
    ) -> Generator[Any, Any, Any]: ...

    def begin(self, life: Life) -> Any:
        run = life.context.run
        try:
            reply = self.open(life)
        except BaseException as error:  # noqa: BLE001
            return Exited(error)
        if type(reply) is Opened:
            return self._await_reply(run, reply.following, reply.awaited)
        return self._await_reply(run, reply) if type(reply) is CoroutineType else reply

    @coroutine
    def _await_reply(self, run: Callable[..., Any], opened: Any, *awaited: Any) -> Generator[Any, Any, Any]:
        try:
            try:
                reply = yield from await_in_context(run, opened, *awaited)
                return STUCK if reply is DISOWNED else reply
            except Closed:
                raise
            except BaseException as error:  # noqa: BLE001
                return self.failure_reply(error)
        except Closed:
            raise
        except BaseException as error:  # noqa: BLE001
            return Exited(error)

    def finish(self, life: Life, reply: Any) -> Any:
        outcome = early_outcome(life, reply)
        return self.go_on(life, None, reply) if outcome is None else outcome

    async def decide(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        try:
            return await call()
        except Exception as error:  # noqa: BLE001
            return failure_reply(error)
        except BaseException as error:  # noqa: BLE001
            return Exited(error)

    def turns(self, number: int) -> AsyncTurns:
        return AsyncTurns(number, self.failure_reply)

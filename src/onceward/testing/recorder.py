"""Notes the effects that handlers call in a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from onceward._functions import is_async
from onceward.middleware import Middleware, StepCall, StepInfo


class RecordedEffect(msgspec.Struct, frozen=True):
    """A call of `session.effect`."""

    consumer: str
    name: str
    key: str | None
    """The idempotency key that the call got; None if the effect was known, and nothing was called."""
    result: Any
    error: BaseException | None = None


class EffectRecorder(Middleware):
    """Notes the effects that handlers call, and leaves them as they are."""

    name = "effects of a test"

    def __init__(self, consumer: str, effects: list[RecordedEffect]) -> None:
        self._consumer = consumer
        self._effects = effects

    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        if step.name != "process":
            return call

        async def process(transaction: Any, *session: Any) -> Any:
            if not session or not hasattr(session[0], "effect"):
                return await call(transaction, *session)
            inner = session[0].effect
            session[0].effect = self._recording_async(inner) if is_async(inner) else self._recording(inner)
            try:
                return await call(transaction, *session)
            finally:
                del session[0].effect

        return process

    def _recording(self, effect: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(name: str, call: Callable[[str], Any], **more: Any) -> Any:
            keys: list[str] = []

            def called(key: str) -> Any:
                keys.append(key)
                return call(key)

            try:
                result = effect(name, called, **more)
            except BaseException as error:
                self._note(name, keys, None, error)
                raise
            self._note(name, keys, result, None)
            return result

        return recorded

    def _recording_async(self, effect: Callable[..., Any]) -> Callable[..., Any]:
        async def recorded(name: str, call: Callable[[str], Any], **more: Any) -> Any:
            keys: list[str] = []

            async def called(key: str) -> Any:
                keys.append(key)
                return await call(key)

            try:
                result = await effect(name, called, **more)
            except BaseException as error:
                self._note(name, keys, None, error)
                raise
            self._note(name, keys, result, None)
            return result

        return recorded

    def _note(self, name: str, keys: list[str], result: Any, error: BaseException | None) -> None:
        self._effects.append(RecordedEffect(self._consumer, name, keys[0] if keys else None, result, error))

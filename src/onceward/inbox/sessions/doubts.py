"""The effects of one attempt that have neither a result nor a refusal: an event with one of them is not done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onceward.inbox.errors import EffectError, EffectRefused
from onceward.task.lifecycle import text_of


class UnsettledEffects:
    def __init__(self) -> None:
        self._begun: dict[object, tuple[Any, BaseException | None]] = {}
        """Their names and errors. Tasks and threads of one handler may use effects at the same time."""

    @contextmanager
    def note(self, name: Any) -> Iterator[None]:
        """An effect begins. It is settled if it returns or was refused."""
        this = object()
        self._begun[this] = (name, None)
        try:
            yield
        except EffectRefused:
            del self._begun[this]
            raise
        except BaseException as error:
            self._begun[this] = (name, error)
            raise
        del self._begun[this]

    def check(self, tracking_id: str) -> None:
        """Raise if the handler has returned with such an effect: the event would be done, the effect perhaps not."""
        for name, error in list(self._begun.values()):
            if error is None:
                raise EffectError(
                    f"effect {name!r:.80} of event {tracking_id} was still running when the handler returned, so "
                    "nothing was committed and the event is not done: wait for it in the handler"
                )
            raise EffectError(
                f"effect {name!r:.80} of event {tracking_id} failed, and the handler caught the error and returned, so "
                f"nothing was committed and the event is not done: {text_of(error)}. Let the error raise: the next "
                "attempt calls the effect again, with the same key. If the provider said no, raise EffectRefused in "
                "the call"
            ) from error

"""Middleware that puts a store of dead letters around the source of a task."""

from __future__ import annotations

from typing import Any

from onceward.connectors.lines import KeyOf
from onceward.deadletters.dead_letters import DeadLetters
from onceward.deadletters.source.base import LetterSource, WrappedSourcePort
from onceward.middleware import Middleware, SourceCalls


class DeadLetterMiddleware(Middleware):
    """Moves the source's dead letters to the store, and delivers redriven ones.

    A source whose dead letters cannot be moved keeps them; redriven letters are still delivered.
    """

    name = "dead letters"

    def __init__(
        self, dead_letters: Any, *, consumer: str, origin: str | None = None, key_of: KeyOf | None = None
    ) -> None:
        """`key_of` is for a consumer whose dead letters hold their keys."""
        self._letters: DeadLetters = dead_letters
        self._consumer = consumer
        self._origin = origin
        self._key_of = key_of

    def wrap_source(self, source: SourceCalls) -> SourceCalls:
        letters = LetterSource(
            WrappedSourcePort(source), self._letters.operations, self._consumer, self._origin, self._key_of
        )
        return source.replace(
            fetch=letters.fetch, settle=letters.settle, extend=letters.extend, lease=letters.lease
        )

"""How a source is called, in threads and in asyncio."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from onceward.errors import ConfigurationError
from onceward.middleware import SourceCalls
from onceward.transaction import Transaction

LETTER_METHODS = ("dead_letters", "forget_dead")
"""Methods of a source whose dead letters can be moved."""


class SourcePort(ABC):
    gives_letters = True
    suffix: ClassVar[str]
    """Suffix of the source's method names."""

    def __init__(self, source: Any) -> None:
        self.source = NoSource() if source is None else source

    def check(self) -> None:
        """Raise `ConfigurationError` if dead letters cannot be moved away from the source."""
        names = [name + self.suffix for name in LETTER_METHODS]
        missing = [name for name in names if not hasattr(self.source, name)]
        if missing:
            raise ConfigurationError(
                f"{type(self.source).__name__} has no {missing[0]}; to move its dead letters, a source needs "
                f"{' and '.join(names)}, like onceward's own connectors"
            )

    @abstractmethod
    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any: ...


class BlockingSourcePort(SourcePort):
    suffix = ""

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.source, method)(*args, **kwargs)


class AsyncSourcePort(SourcePort):
    suffix = "_async"

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.source, method + self.suffix)(*args, **kwargs)


class WrappedSourcePort(SourcePort):
    """A source as middleware receives it."""

    def __init__(self, calls: SourceCalls) -> None:
        super().__init__(calls.connector)
        self._calls = {
            "fetch_transactions": calls.fetch,
            "settle_transactions": calls.settle,
            "extend_transactions": calls.extend,
        }
        self._ask = calls.ask
        self.gives_letters = all(
            hasattr(self.source, name) or hasattr(self.source, f"{name}_async") for name in LETTER_METHODS
        )

    def check(self) -> None:
        """Accept any source: one that keeps its dead letters still receives redriven ones."""

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call = self._calls.get(method)
        return await (self._ask(method, *args) if call is None else call(*args, **kwargs))


class NoSource:
    """An empty source, to deliver only redriven letters."""

    def fetch_transactions(self, _: int, /) -> Sequence[Transaction]:
        return ()

    async def fetch_transactions_async(self, _: int, /) -> Sequence[Transaction]:
        return ()

    def dead_letters(self, _: int) -> Sequence[Any]:
        return ()

    async def dead_letters_async(self, _: int) -> Sequence[Any]:
        return ()

    def forget_dead(self, _: Sequence[Any]) -> None: ...

    async def forget_dead_async(self, _: Sequence[Any]) -> None: ...

    def close(self) -> None: ...

    async def close_async(self) -> None: ...

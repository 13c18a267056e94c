"""Base classes of every error this package raises. See `onceward.task.exceptions` for the whole tree."""

from __future__ import annotations

import pickle
from typing import Any, Self


class OncewardError(Exception):
    """Base of every error this package raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy(), _causes(self))

    def __copy__(self) -> Self:
        # Within a process nothing has to be picklable: keep the original cause.
        copied = type(self).__new__(type(self), *self.args)
        copied.args = self.args
        copied.__dict__.update(self.__dict__)
        copied.__cause__ = self.__cause__
        return copied.with_traceback(self.__traceback__)


def _rebuild(
    cls: type[OncewardError], args: tuple[Any, ...], state: dict[str, Any], causes: list[BaseException]
) -> OncewardError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    effect: BaseException = error
    for cause in causes:
        effect.__cause__ = cause
        effect = cause
    return error


def _causes(error: BaseException) -> list[BaseException]:
    """The chain of causes, up to the first OncewardError, which carries its own causes."""
    chain: list[BaseException] = []
    for cause in with_causes(error)[1:]:
        chain.append(portable(cause))
        if isinstance(cause, OncewardError):
            break
    return chain


def with_causes(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from, each once: user code may raise an error from itself."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is each for each in chain):
        chain.append(cause)
        cause = cause.__cause__
    return chain


def portable(cause: BaseException) -> BaseException:
    """The cause itself; if it does not pickle, an OncewardError with its type and message."""
    if isinstance(cause, OncewardError):
        return cause
    try:
        pickle.loads(pickle.dumps(cause))
    except Exception:  # noqa: BLE001  pickling runs foreign code
        return OncewardError(f"{type(cause).__name__}: {cause}")
    return cause


class ConfigurationError(OncewardError, ValueError):
    """An invalid configuration. The message says how to fix it."""


class NotFoundError(ConfigurationError):
    """What was named does not exist."""


class FileLostError(OncewardError):
    """A file was deleted or replaced while it was open. Nothing more is acknowledged, because new writes would go to
    a file that nobody can find. The message names the file and says what to do."""

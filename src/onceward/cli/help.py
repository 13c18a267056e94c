"""Load what formats the help, without what it hardly needs: highlighting of source code takes a fifth of the time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

SELDOM = ("rich.syntax", "rich.traceback")
"""The formatter of typer imports classes of these; our help has neither source code nor tracebacks."""


class _Later(type):
    """The type of classes that stand for one of another module, which is loaded when one is used."""

    place: tuple[str, str]

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._real(), name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._real()(*args, **kwargs)

    def _real(cls) -> Any:
        module, name = cls.place
        return getattr(import_module(module), name)


class _StandIn(ModuleType):
    """A module of such classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Later(name, (), {"place": (self.__name__, name)})


def load_formatter() -> None:
    """Import `typer.rich_utils`."""
    with _standing_in():
        import_module("typer.rich_utils")


@contextmanager
def _standing_in() -> Iterator[None]:
    absent = [name for name in SELDOM if name not in sys.modules]
    sys.modules.update({name: _StandIn(name) for name in absent})
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]

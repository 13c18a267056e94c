"""A service that stands for the outside world: every call to it is noted, even if a fake opens nothing."""

from __future__ import annotations

import inspect
import sys
from enum import Enum
from typing import Any

from onceward.verify.watch.calls import record
from onceward.verify.watch.intrusions import note

_OWN = frozenset(
    {
        "__getattribute__",
        "__getattr__",
        "__setattr__",
        "__init__",
        "__new__",
        "__dict__",
        "__slots__",
    }
)


def outside(name: str, service: Any) -> Any:
    """Wrap a service. The wrapper passes for it: with `isinstance`, `with`, `for` and so on."""
    special = {
        attribute: _noting(name, attribute)
        for attribute in dir(type(service))
        if attribute.startswith("__") and attribute not in _OWN and attribute not in vars(object)
        if callable(getattr(type(service), attribute, None))
    }
    return type("Outside", (_Outside,), special)(name, service)


class _Outside:
    def __init__(self, name: str, service: Any) -> None:
        object.__setattr__(self, "_onceward_name", name)
        object.__setattr__(self, "_onceward_service", service)

    @property
    def __class__(self) -> Any:
        return self._onceward_service.__class__

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("the class of a service cannot change")

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._onceward_service, attribute)
        name = f"{self._onceward_name}.{attribute}"
        if inspect.isroutine(value) or (callable(value) and isinstance(value, type)):
            return _noting_call(name, value)
        return outside(name, value) if _may_call(value) else value

    def __setattr__(self, attribute: str, value: Any) -> None:
        setattr(self._onceward_service, attribute, value)


def _may_call(value: Any) -> bool:
    """Whether it is a part of a client, as in `client.charges.create()`, and not data."""
    module = type(value).__module__.partition(".")[0]
    return callable(value) or (module not in sys.stdlib_module_names and not isinstance(value, Enum))


def _noting_call(name: str, function: Any) -> Any:
    def note_and_call(*args: Any, **more: Any) -> Any:
        note(f"called {name}", sys._getframe(1))
        record(name, function, args, more)
        return function(*args, **more)

    return note_and_call


def _noting(name: str, special: str) -> Any:
    def note_and_call(self: Any, *args: Any, **more: Any) -> Any:
        what = name if special == "__call__" else f"{name}.{special}"
        note(f"called {what}", sys._getframe(1))
        real = getattr(self._onceward_service, special)
        record(what, real, args, more)
        return real(*args, **more)

    return note_and_call

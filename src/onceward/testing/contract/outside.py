"""A service that stands for the outside world: calls to it are seen, even if it is a fake that opens nothing."""

from __future__ import annotations

import sys
from typing import Any

from onceward.testing.contract import watch


class Outside:
    """The service, with each call noted."""

    def __init__(self, name: str, service: Any) -> None:
        self.__name = name
        self.__service = service

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self.__service, attribute)
        if not callable(value):
            return value

        def called(*args: Any, **more: Any) -> Any:
            watch.note(f"called {self.__name}.{attribute}", sys._getframe(1))
            return value(*args, **more)

        return called

    def __call__(self, *args: Any, **more: Any) -> Any:
        watch.note(f"called {self.__name}", sys._getframe(1))
        return self.__service(*args, **more)

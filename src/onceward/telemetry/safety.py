"""Telemetry observes, and decides nothing: what it raises is logged once and changes nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from onceward.telemetry.logger import OwnLogger

logger = OwnLogger(logging.getLogger("onceward.engine"))

_reported: set[tuple[str, type[BaseException]]] = set()


def quietly(function: Callable[..., Any], *args: Any, default: Any = None, **kwargs: Any) -> Any:
    """Call telemetry, which may run code of users. Return `default` if it raises."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001
        report_failure(getattr(function, "__qualname__", type(function).__qualname__), error)
        return default


def report_failure(where: str, error: Exception) -> None:
    """Log the first failure of its kind."""
    kind = (where, type(error))
    if kind not in _reported:
        _reported.add(kind)
        text = "telemetry failed in %s with %s; the work goes on, and this is not logged again"
        logger.warning(text, where, type(error).__name__, exc_info=error)


def show(value: Any) -> str:
    """The value as text that every exporter can encode."""
    try:
        text = str(value)
    except Exception:  # noqa: BLE001  a broken __str__ must not hide what happened
        text = f"{type(value).__name__}, which cannot be shown"
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


class SafeMeter:
    """A meter whose instruments raise nothing."""

    def __init__(self, provider: Any, scope: str) -> None:
        self._meter = quietly(provider.get_meter, scope)

    def __getattr__(self, name: str) -> Any:
        """`create_counter` and its like."""
        return lambda *args, **kwargs: SafeInstrument(quietly(getattr, self._meter, name), args, kwargs)


class SafeInstrument:
    """A counter or histogram that raises nothing, and does nothing if it could not be created."""

    __slots__ = ("_add", "_record")

    def __init__(self, create: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        made = None if create is None else quietly(create, *args, **kwargs)
        self._add = quietly(getattr, made, "add", None)
        self._record = quietly(getattr, made, "record", None)

    def add(self, amount: float, attributes: dict[str, Any]) -> None:
        try:
            if self._add is not None:
                self._add(amount, attributes)
        except Exception as error:  # noqa: BLE001
            report_failure("a counter", error)

    def record(self, amount: float, attributes: dict[str, Any]) -> None:
        try:
            if self._record is not None:
                self._record(amount, attributes)
        except Exception as error:  # noqa: BLE001
            report_failure("a histogram", error)

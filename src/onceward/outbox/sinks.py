"""The sinks of a relay: one connector for each target, kept open; and whether a failure is an outage of the sink."""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry import context, trace

from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.sqlite.database import DatabaseBusyError
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError, FileLostError, with_causes
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Transaction

_log = OwnLogger(logging.getLogger("onceward.outbox"))

OUTAGES = (
    OSError,
    sqlite3.OperationalError,
    ConnectorClosedError,
    DatabaseBusyError,
    ConfigurationError,
    FileLostError,
)
OUTAGE_NAMES = frozenset(
    {
        "AuthenticationError",
        "BusyLoadingError",
        "ClusterDownError",
        "ConnectionError",
        "InsufficientPrivilege",
        "InterfaceError",
        "InvalidSchemaName",
        "NatsUnavailable",
        "NoPermissionError",
        "OperationalError",
        "OutOfMemoryError",
        "ReadOnlyError",
        "ReadOnlySqlTransaction",
        "TimeoutError",
        "Unauthenticated",
        "UndefinedFunction",
        "UndefinedTable",
        "PermissionDenied",
        "Unavailable",
        "Backpressure",
        "QuotaExceeded",
    }
)
"""Classes of drivers, which need not be installed."""
REDIS_REFUSAL = re.compile(
    r"\b(CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|NOPERM|NOREPLICAS|OOM|READONLY)\b|^ACL failure in script"
    "|The user executing the script can't"
)
"""In the text of a ResponseError: its class does not say so, or the error comes out of a script."""


def is_outage(error: BaseException | None) -> bool:
    """Whether the sink, and not the message, is to blame: then no failure is counted, and the whole target waits."""
    return error is not None and any(map(_refuses_all, with_causes(error)))


def _refuses_all(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    return (
        isinstance(error, OUTAGES)
        or not names.isdisjoint(OUTAGE_NAMES)
        or ("ResponseError" in names and REDIS_REFUSAL.search(str(error)) is not None)
    )


class Sinks:
    """Opens a connector when it is first needed, and closes it after an outage, so the next try begins afresh."""

    def __init__(self, address_of: Callable[[str], Address]) -> None:
        self._address_of = address_of
        self._open: dict[str, Any] = {}
        self._lock = threading.Lock()

    def dispatch(self, target: str, transactions: Sequence[Transaction]) -> None:
        """Send these, all or none, in this order."""
        with self._lock:
            sink = self._open.get(target)
            if sink is None:
                sink = self._open[target] = self._address_of(target).open(asynchronous=False)
        # Each message carries the trace of the transaction that sent it, not that of the relay.
        token = context.attach(trace.set_span_in_context(trace.INVALID_SPAN))
        try:
            sink.dispatch_transactions(transactions)
        finally:
            context.detach(token)

    def drop(self, target: str) -> None:
        with self._lock:
            sink = self._open.pop(target, None)
        if sink is not None:
            _close(target, sink)

    def close(self) -> None:
        for target in list(self._open):
            self.drop(target)


def _close(target: str, sink: Any) -> None:
    try:
        sink.close()
    except Exception as error:  # noqa: BLE001  it is not needed any more
        _log.warning("could not close the connector of %s: %s", target, error)

"""Wires: where transactions come from and go to. `base` has the contract, the rest implements it."""

from onceward.connectors.base import AsyncConnector, Connector, ConnectorClosedError
from onceward.connectors.codec import DecodeError, PayloadError
from onceward.connectors.dead_message import BurialReason
from onceward.connectors.dead_message import DeadMessage as DeadLetter
from onceward.connectors.memory import AsyncMemoryConnector, MemoryConnector
from onceward.connectors.sqlite import AsyncSqliteConnector, DatabaseBusyError, SqliteConnector

__all__ = [
    "AsyncConnector",
    "AsyncMemoryConnector",
    "AsyncSqliteConnector",
    "BurialReason",
    "Connector",
    "ConnectorClosedError",
    "DatabaseBusyError",
    "DeadLetter",
    "DecodeError",
    "MemoryConnector",
    "PayloadError",
    "SqliteConnector",
]

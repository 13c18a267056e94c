"""Wires: where transactions come from and go to. `base` defines the contract; the other modules implement it.

`scheme` and `reports` are for packages that add a connector: see docs/how-to/write-a-connector.md.
"""

from onceward.connectors.base import AsyncConnector, Connector, ConnectorClosedError
from onceward.connectors.codec import DecodeError, PayloadError
from onceward.connectors.lease_rules import BurialReason, DeadMessage
from onceward.connectors.memory import AsyncMemoryConnector, MemoryConnector
from onceward.connectors.reports import (
    Durability,
    Hazard,
    ServerUnreachable,
    SourceCounts,
    SourceFacts,
    Survives,
)
from onceward.connectors.scheme import LEASE_SETTINGS, Scheme, Setting
from onceward.connectors.sqlite import AsyncSqliteConnector, DatabaseBusyError, SqliteConnector
from onceward.connectors.urls import Address

__all__ = [
    "LEASE_SETTINGS",
    "Address",
    "AsyncConnector",
    "AsyncMemoryConnector",
    "AsyncSqliteConnector",
    "BurialReason",
    "Connector",
    "ConnectorClosedError",
    "DatabaseBusyError",
    "DeadLetter",
    "DeadMessage",
    "DecodeError",
    "Durability",
    "Hazard",
    "MemoryConnector",
    "PayloadError",
    "Scheme",
    "ServerUnreachable",
    "Setting",
    "SourceCounts",
    "SourceFacts",
    "SqliteConnector",
    "Survives",
]

DeadLetter = DeadMessage
"""The former name. A dead letter in the store is `onceward.deadletters.DeadLetter`."""

"""A boundary: a durable log of facts with named cursors, and the artifacts that facts refer to.

    onceward boundary serve --listen 127.0.0.1:7700 --data ./boundary

    with BoundaryClient("http://127.0.0.1:7700") as client:
        envelope = envelope_for(message_id_for("batch", "B1042", "completed"), from_zone="plant-a", to_zone="hq")
        client.append(envelope, fact_of("batch:B1042", "completed", {"litres": 480}))

Callers of a boundary need only this module, and `strategies`: ready-made ways to apply a fact that may arrive twice.
To embed a boundary, see `boundary`, `stores` and `server`.
"""

from onceward.boundary.artifacts import ArtifactError, ArtifactMissingError, BadReferenceError, IntegrityError
from onceward.boundary.client.client import BoundaryClient
from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
from onceward.boundary.consumer import AsyncBoundaryConsumer, BoundaryConsumer
from onceward.boundary.errors import BoundaryError
from onceward.boundary.model import (
    Appended,
    Envelope,
    Fact,
    Gap,
    ObjectRef,
    Page,
    StoredFact,
    envelope_for,
    fact_of,
    message_id_for,
)

__all__ = [
    "Appended",
    "ArtifactError",
    "ArtifactMissingError",
    "AsyncBoundaryClient",
    "AsyncBoundaryConsumer",
    "BadReferenceError",
    "BoundaryClient",
    "BoundaryConsumer",
    "BoundaryError",
    "Envelope",
    "Fact",
    "Gap",
    "IntegrityError",
    "ObjectRef",
    "Page",
    "StoredFact",
    "envelope_for",
    "fact_of",
    "message_id_for",
]

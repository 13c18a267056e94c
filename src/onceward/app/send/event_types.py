"""The event type of a message for a consumer of the app: the only one that its contract accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onceward.errors import ConfigurationError
from onceward.transaction import ReadOnlyDict

if TYPE_CHECKING:
    from onceward.inbox import Contract

NO_METADATA = ReadOnlyDict()


def with_event_type(
    consumer: str, contract: Contract | None, payload: Any, metadata: Mapping[str, Any] = NO_METADATA
) -> Mapping[str, Any]:
    """Return the metadata with the type that the contract accepts, unless the message has one.

    Raises `ConfigurationError` if the contract accepts several: it would refuse a message without a type.
    """
    if contract is None or contract.accepts("") or metadata.get("event_type") is not None:
        return metadata
    if isinstance(payload, Mapping) and payload.get("event_type") is not None:
        return metadata
    if len(contract.event_types) > 1:
        raise ConfigurationError(
            f"{consumer} accepts several event types, {', '.join(contract.event_types)}, and the message has none"
        )
    return {**metadata, "event_type": contract.event_types[0]}

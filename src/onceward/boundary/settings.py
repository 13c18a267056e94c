"""Settings of a boundary."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from onceward.boundary.model import STREAMS
from onceward.errors import ConfigurationError

WEEK = 7 * 86400.0


class BoundarySettings(msgspec.Struct, frozen=True, kw_only=True):
    strict_consumers: bool = False
    """Only known consumers may fetch. Otherwise a consumer's first fetch registers it."""
    require_artifacts: bool = False
    """Refuse a fact that refers to an object until the object is stored here."""
    retention: Mapping[str, float] = {}
    """Seconds to keep facts, by class; a week for classes not listed."""
    capacity_bytes: int | None = None
    """Limit for the size of all facts. None is no limit."""
    backpressure_at: float = 0.8
    """Fraction of the capacity above which new facts are refused."""
    drop_oldest: bool = False
    """Instead of refusing new facts, remove the oldest, confirmed or not."""
    safety: bool = False
    """Facts here must never be dropped to make room: forbids `drop_oldest`."""
    max_consumers: int = 1000
    """Names that fetches may register. Names in the configuration are not limited."""
    max_labels: int = 64
    """Labels of one fact. Their bytes count toward the size of the fact."""
    max_objects: int = 1_000_000
    max_object_bytes: int = 100 * 10**9
    """Of all objects together."""

    def __post_init__(self) -> None:
        if self.drop_oldest and self.safety:
            raise ConfigurationError(
                "drop_oldest would lose facts, which safety forbids; remove one of the two"
            )
        if not 0 < self.backpressure_at <= 1:
            raise ConfigurationError(
                f"backpressure_at must be above 0 and at most 1, not {self.backpressure_at}"
            )
        if self.capacity_bytes is not None and self.capacity_bytes < 1:
            raise ConfigurationError(f"capacity_bytes must be 1 or more, not {self.capacity_bytes}")
        for name in ("max_consumers", "max_labels", "max_objects", "max_object_bytes"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for stream, seconds in self.retention.items():
            if stream not in STREAMS:
                raise ConfigurationError(
                    f"retention has no class {stream!r}; the classes are {', '.join(STREAMS)}"
                )
            if not seconds > 0:
                raise ConfigurationError(f"retention of {stream} must be above 0 seconds, not {seconds}")

    def retention_seconds(self, stream: str) -> float:
        return self.retention.get(stream, WEEK)

    @property
    def shortest_retention(self) -> float:
        return min(map(self.retention_seconds, STREAMS))

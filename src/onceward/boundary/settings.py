"""What can be chosen about a boundary."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from onceward.boundary.model import STREAMS
from onceward.errors import ConfigurationError

WEEK = 7 * 86400.0


class BoundarySettings(msgspec.Struct, frozen=True, kw_only=True):
    strict_consumers: bool = False
    """Only names that are known may fetch; otherwise the first fetch makes a name known."""
    require_artifacts: bool = False
    """A fact that names an object is refused while the object is not here."""
    retention: Mapping[str, float] = {}
    """Seconds for which facts of a class are kept; a week for a class that is not named."""
    capacity_bytes: int | None = None
    """What the facts may take. None: nobody looks."""
    backpressure_at: float = 0.8
    """The part of the capacity beyond which no more facts are taken."""
    drop_oldest: bool = False
    """Instead of refusing new facts, remove the oldest, confirmed or not."""
    safety: bool = False
    """Facts here must not be lost to make room: `drop_oldest` is refused."""

    def __post_init__(self) -> None:
        if self.drop_oldest and self.safety:
            raise ConfigurationError(
                "drop_oldest would lose facts, which safety forbids; leave one of the two out"
            )
        if not 0 < self.backpressure_at <= 1:
            raise ConfigurationError(
                f"backpressure_at must be above 0 and at most 1, not {self.backpressure_at}"
            )
        if self.capacity_bytes is not None and self.capacity_bytes < 1:
            raise ConfigurationError(f"capacity_bytes must be 1 or more, not {self.capacity_bytes}")
        for stream, seconds in self.retention.items():
            if stream not in STREAMS:
                raise ConfigurationError(
                    f"retention knows the classes {', '.join(STREAMS)}, and no {stream!r}"
                )
            if not seconds > 0:
                raise ConfigurationError(f"retention of {stream} must be above 0 seconds, not {seconds}")

    def kept_for(self, stream: str) -> float:
        """Seconds."""
        return self.retention.get(stream, WEEK)

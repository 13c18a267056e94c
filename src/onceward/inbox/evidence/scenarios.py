"""The scenarios that a proof consists of. Evidence records their names, so they must not change."""

from __future__ import annotations

from typing import Final

CLEAN: Final = "clean"
DUPLICATES: Final = "duplicates"
REPLAY: Final = "replay"
INTERPRETERS: Final = "interpreters"

NAMES: Final = (
    CLEAN,
    "every-type",
    DUPLICATES,
    "duplicates-at-once",
    "duplicates-in-processes",
    REPLAY,
    "order",
    "lost-updates",
    "side-by-side",
    "unknown-fields",
    "missing-fields",
    "old-versions",
    "refused",
    "exceptions",
    "kills",
    "sends",
    "groups",
    INTERPRETERS,
    "state",
    "early-effects",
    "outside-calls",
)
"""In the order they run. All of them have to pass, or not apply."""

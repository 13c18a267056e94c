"""The names of the scenarios, in the order in which they run. They are recorded, so they stay."""

from __future__ import annotations

from typing import Final

from onceward.inbox.evidence.evidence import DUPLICATES, REPLAY

CLEAN: Final = "clean"
AT_ONCE: Final = "duplicates-at-once"
IN_PROCESSES: Final = "duplicates-in-processes"
ORDER: Final = "order"
UNKNOWN_FIELDS: Final = "unknown-fields"
MISSING_FIELDS: Final = "missing-fields"
OLD_VERSIONS: Final = "old-versions"
REFUSED: Final = "refused"
EXCEPTIONS: Final = "exceptions"
KILLS: Final = "kills"
STATE: Final = "state"
EARLY_EFFECTS: Final = "early-effects"
OUTSIDE_CALLS: Final = "outside-calls"

NAMES: Final = (
    CLEAN,
    DUPLICATES,
    AT_ONCE,
    IN_PROCESSES,
    REPLAY,
    ORDER,
    UNKNOWN_FIELDS,
    MISSING_FIELDS,
    OLD_VERSIONS,
    REFUSED,
    EXCEPTIONS,
    KILLS,
    STATE,
    EARLY_EFFECTS,
    OUTSIDE_CALLS,
)

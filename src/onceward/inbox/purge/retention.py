"""How long to keep a dedup record (D-14).

Without its record, a copy of an event looks new. So the record has to outlive everything that can still deliver a copy:
the source, dead letters that may be redriven, and a replay. The class of the data also sets a minimum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.inbox.contract import Contract

Retention = Literal["standard", "financial", "legal-hold"]

CLASS_FLOORS: Final[dict[str, float | None]] = {"standard": 7, "financial": 30, "legal-hold": None}
"""Minimum days to keep records of each class. None: until released by hand."""

SHORTEST_DEAD_LETTER_DAYS: Final = 90
"""Minimum days to keep dead letters; any of them may be redriven."""


class Window(NamedTuple):
    """A span in which a copy of an event can still arrive, counted from the event's own day."""

    setting: str
    """As written in the contract."""
    days: float
    copy: str
    """The copy that would arrive, for a message that continues with "would run a second time"."""


def windows(contract: Contract) -> list[Window]:
    """Return all spans that a dedup record has to outlive, except a legal hold, which has no end."""
    spans = [
        ("source_days", contract.source_days, "a message that the source delivers again"),
        ("dead_letter_days", contract.dead_letter_days, "a redriven dead letter"),
        ("replay_days", contract.replay_days, "a replayed event"),
    ]
    found = [Window(f"{name}={_days(days)}", days, copy) for name, days, copy in spans]
    floor = CLASS_FLOORS[contract.retention]
    if floor is not None:
        found.append(Window(f"retention={contract.retention!r}", floor, "a late copy"))
    return found


def required_days(contract: Contract) -> float | None:
    """Return the minimum days to keep dedup records. None: until released."""
    if CLASS_FLOORS[contract.retention] is None:
        return None
    return max(window.days for window in windows(contract))


def effective_days(contract: Contract) -> float | None:
    """Return the days to keep dedup records: as set, otherwise the minimum. None: until released."""
    return required_days(contract) if contract.dedup_days is None else contract.dedup_days


def check_retention(contract: Contract) -> None:
    """Raise `ConfigurationError` if `dedup_days` is shorter than any window in which a copy can arrive."""
    if contract.dedup_days is None:
        return
    required = required_days(contract)
    if required is None:
        danger = (
            f"after day {_days(contract.dedup_days)} a copy of an event under hold would run a second time"
        )
        advice = "leave out dedup_days: such records are kept until they are released"
    elif contract.dedup_days < required:
        danger = _dangers(contract, contract.dedup_days)
        advice = f"set dedup_days to {_days(required)} or more, or leave it out"
    else:
        return
    raise ConfigurationError(
        f"consumer {contract.consumer_id!r}: dedup_days={_days(contract.dedup_days)} is too short: "
        f"{danger}; {advice}"
    )


def _dangers(contract: Contract, dedup_days: float) -> str:
    """Describe the spans in which a second effect could happen, longest first."""
    longer = [window for window in windows(contract) if window.days > dedup_days]
    longer.sort(key=lambda window: window.days, reverse=True)
    return ", ".join(
        f"between day {_days(dedup_days)} and day {_days(window.days)} {window.copy} would run a second time "
        f"({window.setting})"
        for window in longer
    )


def _days(days: float) -> str:
    return f"{days:.15g}"  # 90 instead of 90.0, but 89.9999 is not rounded to 90

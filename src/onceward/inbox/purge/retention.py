"""How long a dedup record has to live (D-14).

A record that is gone makes a copy look new. So it has to outlive everything that can still bring a copy:
the source, the dead letters that may be redriven, and a replay. The class of the data sets a floor besides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.inbox.contract import Contract

Retention = Literal["standard", "financial", "legal-hold"]

CLASS_FLOORS: Final[dict[str, float | None]] = {"standard": 7, "financial": 30, "legal-hold": None}
"""Days that records of each class are kept at least. None: until released by hand."""

SHORTEST_DEAD_LETTER_DAYS: Final = 90
"""Dead letters are kept at least so long, and any of them may be redriven."""


class Window(NamedTuple):
    """A span in which a copy of an event can still come, counted from the event's own day."""

    setting: str
    """As it is written in the contract."""
    days: float
    copy: str
    """What would come, for a sentence that goes on with "would run a second time"."""


def windows(contract: Contract) -> list[Window]:
    """All spans that a dedup record has to outlive, apart from a legal hold, which has no end."""
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
    """The fewest days that dedup records may be kept. None: until released."""
    if CLASS_FLOORS[contract.retention] is None:
        return None
    return max(window.days for window in windows(contract))


def effective_days(contract: Contract) -> float | None:
    """The days that dedup records are kept: as set, or else the fewest allowed. None: until released."""
    return required_days(contract) if contract.dedup_days is None else contract.dedup_days


def check_retention(contract: Contract) -> None:
    """Refuses a `dedup_days` that is shorter than any window in which a copy can come."""
    if contract.dedup_days is None:
        return
    required = required_days(contract)
    if required is None:
        danger = (
            f"after day {_days(contract.dedup_days)} a copy of an event under hold would run a second time"
        )
        advice = "leave dedup_days out: such records are kept until they are released"
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
    """The spans in which a second effect could happen, the longest first."""
    longer = [window for window in windows(contract) if window.days > dedup_days]
    longer.sort(key=lambda window: window.days, reverse=True)
    return ", ".join(
        f"between day {_days(dedup_days)} and day {_days(window.days)} {window.copy} would run a second time "
        f"({window.setting})"
        for window in longer
    )


def _days(days: float) -> str:
    return f"{days:.15g}"  # 90, not 90.0, and yet 89.9999 is not called 90

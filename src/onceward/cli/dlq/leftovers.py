"""Letters that a command left as they were, and why: they are on hold, not on hold, or not open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onceward._sync import run_blocking
from onceward._text import quantity

if TYPE_CHECKING:
    from onceward.deadletters import DeadLetters, Filter
    from onceward.deadletters.queries import LettersInState


def tally(letters: DeadLetters, wanted: Filter) -> list[LettersInState]:
    """How many letters match, by their state."""
    return run_blocking(letters.operations.tally(wanted))


def count(found: Sequence[LettersInState]) -> int:
    return sum(each.letters for each in found)


def describe_holds(letters: DeadLetters, held: Sequence[LettersInState], *, were: bool = False) -> str:
    """`letter 10 is on hold by ann: case 7`."""
    number, first = count(held), min(each.first for each in held)
    hold = run_blocking(letters.operations.hold_of(first))
    by = f" by {' or '.join(hold.operators)}" if hold and hold.operators else ""
    why = f"{by}: {hold.reason}" if hold else ""
    if number == 1:
        return f"letter {first} {'was' if were else 'is'} on hold{why}"
    return f"{number:,} letters {'were' if were else 'are'} on hold, such as letter {first}{why}"


def explain_discard(letters: DeadLetters, found: Sequence[LettersInState]) -> str:
    """Why letters that match were not discarded."""
    held = [each for each in found if each.is_open and each.held]
    if held:
        which = f"--id {held[0].first}" if count(held) == 1 else "…"
        return (
            f"{describe_holds(letters, held)}\n"
            f"To discard what is on hold, first release it: `onceward dlq release {which} --reason …`"
        )
    settled = [each for each in found if not each.is_open]
    if not settled:
        return "they were not open a moment ago; try again"
    states = {each.status: count([one for one in settled if one.status is each.status]) for each in settled}
    if count(settled) == 1:
        return f"letter {settled[0].first} is {settled[0].status}; only open letters can be discarded"
    there = ", ".join(f"{number:,} {status}" for status, number in states.items())
    return f"of the {quantity(count(settled), 'letter')} that match, none is open: {there}"


def explain_release(found: Sequence[LettersInState]) -> str:
    """Why letters that match were not released."""
    if count(found) == 1:
        return f"letter {found[0].first} is not on hold"
    return f"none of the {count(found):,} letters that match is on hold"

"""Reasons to come again later. No failures: nothing is counted, nothing is acknowledged."""

from __future__ import annotations

from onceward.task.exceptions import Postponed


class Busy(Postponed):
    """Another copy of the event is in hand, or the database is; whoever has it may still roll back."""


class Parked(Postponed):
    """An earlier event of the same aggregate has not come yet."""

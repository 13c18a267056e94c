"""What failed for good, whoever buried it: kept with its history, seen, mended, and sent again safely."""

from onceward.deadletters.faces import AsyncDeadLetters, DeadLetters
from onceward.deadletters.filters import Filter
from onceward.deadletters.letter import Burial, Category, DeadLetter, Failure, Status
from onceward.deadletters.rcas import Rca, RedriveRefusedError
from onceward.deadletters.redrive import Redrive

__all__ = [
    "AsyncDeadLetters",
    "Burial",
    "Category",
    "DeadLetter",
    "DeadLetters",
    "Failure",
    "Filter",
    "Rca",
    "Redrive",
    "RedriveRefusedError",
    "Status",
]

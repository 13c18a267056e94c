"""Messages that failed permanently, stored with their history, to inspect, discard or redrive."""

from onceward.deadletters.dead_letters import DeadLetters
from onceward.deadletters.dead_letters_asyncio import AsyncDeadLetters
from onceward.deadletters.letter import Burial, Category, DeadLetter, Failure, Status
from onceward.deadletters.queries import Filter
from onceward.deadletters.redrive import Redrive
from onceward.deadletters.root_causes import Rca, RedriveRefusedError

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

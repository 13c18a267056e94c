"""Messages that failed permanently, stored with their history, to inspect, discard or redrive."""

from onceward.connectors.lease_rules import Failure
from onceward.deadletters.burial import Burial
from onceward.deadletters.dead_letters import DeadLetters
from onceward.deadletters.dead_letters_asyncio import AsyncDeadLetters
from onceward.deadletters.edits import EditRefusedError
from onceward.deadletters.groups import LetterGroup
from onceward.deadletters.letter import Category, DeadLetter, Status
from onceward.deadletters.queries import Filter
from onceward.deadletters.redrive import Redrive
from onceward.deadletters.root_causes import Rca, RedriveRefusedError

__all__ = [
    "AsyncDeadLetters",
    "Burial",
    "Category",
    "DeadLetter",
    "DeadLetters",
    "EditRefusedError",
    "Failure",
    "Filter",
    "LetterGroup",
    "Rca",
    "Redrive",
    "RedriveRefusedError",
    "Status",
]

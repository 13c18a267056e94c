"""Connectors with a store of dead letters: `WithDeadLetters`, and `AsyncWithDeadLetters` for asyncio."""

from onceward.deadletters.source.connector import WithDeadLetters
from onceward.deadletters.source.connector_asyncio import AsyncWithDeadLetters

__all__ = ["AsyncWithDeadLetters", "WithDeadLetters"]

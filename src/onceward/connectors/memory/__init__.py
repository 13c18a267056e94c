"""A queue in this process's memory: `MemoryConnector` for threads, `AsyncMemoryConnector` for asyncio."""

from onceward.connectors.memory.connector import AsyncMemoryConnector, MemoryConnector, MemoryLeaseStore

__all__ = ["AsyncMemoryConnector", "MemoryConnector", "MemoryLeaseStore"]

"""A real process that appends to a boundary on JetStream, for the crash tests to kill.

Run as `python jetstream_worker.py <nats url> <name> <first number>`. It appends facts m<number>, and prints
`number offset` for each answer, until it is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys

from onceward.boundary.stores.jetstream.store import JetStreamBoundaryStore
from onceward.testing.boundary import fact

APPENDERS = 16


async def main(url: str, name: str, first: str) -> None:
    store = await JetStreamBoundaryStore.open(url, name=name)
    numbers = itertools.count(int(first))

    async def append() -> None:
        for number in numbers:
            appended = await store.append(fact(f"m{number}"))
            os.write(1, f"{number} {appended.offset}\n".encode())

    await asyncio.gather(*(append() for _ in range(APPENDERS)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""A boundary on PostgreSQL without its server, as a real process to be killed.

Run as `python appender.py <url> <name> <count>`. Eight appenders at once append `count` facts called `<name>-<number>`,
or with 0 run forever; each then confirms its fact for the consumer `<name>`. Every answer is a line of output:
`appended <message id> <offset>` or `confirmed <position>`.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

from onceward.boundary.model import Envelope, Fact
from onceward.boundary.store import NewFact
from onceward.boundary.stores.postgresql.store import PostgreSqlBoundaryStore
from onceward.boundary.wire import record

AT_ONCE = 8


def fact(message_id: str) -> NewFact:
    envelope = Envelope(message_id=message_id, from_zone="a", to_zone="b", produced_at_unix_ms=1)
    body = Fact(subject="batch:B1", predicate="done", object_json='"done"')
    return NewFact(message_id, b"digest", record(envelope, body))


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def main(url: str, name: str, count: int) -> None:
    store = await PostgreSqlBoundaryStore.open(url)
    numbers = iter(range(count)) if count else itertools.count()

    async def append() -> None:
        for number in numbers:
            done = await store.append(fact(f"{name}-{number}"))
            say("appended", f"{name}-{number}", done.offset)
            say("confirmed", await store.advance(name, done.offset))

    await asyncio.gather(*(append() for _ in range(AT_ONCE)))
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))

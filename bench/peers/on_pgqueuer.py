"""pgqueuer: jobs in PostgreSQL, each inserts a row. Arguments: URL, number of jobs, connections.

Its own concurrency_limit made it wait a second between rounds of that many, so here the connections are the limit.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import timedelta

import psycopg
from pgqueuer.db import PsycopgDriver
from pgqueuer.models import Job
from pgqueuer.qm import QueueManager
from pgqueuer.queries import Queries

BATCH = 100


async def main(url: str, count: int, concurrency: int) -> None:
    free: asyncio.Queue[psycopg.AsyncConnection] = asyncio.Queue()
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as own:
        queries = Queries(PsycopgDriver(own))
        await queries.install()
        bodies: list[bytes | None] = [
            json.dumps({"id": f"order-{n}", "total": n}).encode() for n in range(count)
        ]
        await queries.enqueue(["orders"] * count, bodies, [0] * count)
        for _ in range(concurrency):
            free.put_nowait(await psycopg.AsyncConnection.connect(url, autocommit=True))
        manager = QueueManager(queries)
        left, last = count, 0.0

        @manager.entrypoint("orders")
        async def order(job: Job) -> None:
            nonlocal left, last
            body = json.loads(job.payload or b"")
            connection = await free.get()
            try:
                async with connection.transaction():
                    await connection.execute(
                        "INSERT INTO orders VALUES (%s, %s)", (body["id"], body["total"])
                    )
            finally:
                free.put_nowait(connection)
            left -= 1
            if left == 0:  # its own end would take seconds more
                last = time.perf_counter()
                manager.shutdown.set()

        began = time.perf_counter()
        await manager.run(dequeue_timeout=timedelta(seconds=1), batch_size=BATCH)
        took = last - began
        while not free.empty():
            await free.get_nowait().close()
    print(count / took)


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))

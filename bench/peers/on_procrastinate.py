"""procrastinate: jobs in PostgreSQL, each inserts a row. Arguments: URL, number of jobs, concurrency."""

from __future__ import annotations

import asyncio
import sys
import time

import procrastinate
import psycopg


async def main(url: str, count: int, concurrency: int) -> None:
    app = procrastinate.App(
        connector=procrastinate.PsycopgConnector(conninfo=url, min_size=1, max_size=concurrency + 2)
    )
    free: asyncio.Queue[psycopg.AsyncConnection] = asyncio.Queue()

    @app.task(queue="orders")
    async def order(id: str, total: int) -> None:
        connection = await free.get()
        try:
            async with connection.transaction():
                await connection.execute("INSERT INTO orders VALUES (%s, %s)", (id, total))
        finally:
            free.put_nowait(connection)

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        await order.batch_defer_async(*({"id": f"order-{n}", "total": n} for n in range(count)))
        for _ in range(concurrency):
            free.put_nowait(await psycopg.AsyncConnection.connect(url, autocommit=True))
        began = time.perf_counter()
        await app.run_worker_async(
            queues=["orders"], wait=False, concurrency=concurrency, install_signal_handlers=False
        )
        took = time.perf_counter() - began
        while not free.empty():
            await free.get_nowait().close()
    print(count / took)


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))

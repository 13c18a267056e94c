"""Processes that call a boundary with the asyncio client, and exit at once.

Run as `python exits.py <boundary's url> <count>`. They are forked, so imports happen only once. A line of output says
how each ended.
"""

from __future__ import annotations

import asyncio
import os
import sys

from onceward.boundary import AsyncBoundaryClient


async def ask(url: str) -> None:
    async with AsyncBoundaryClient(url) as client:
        await client.fetch("c")


if __name__ == "__main__":
    url, count = sys.argv[1:]
    for _ in range(int(count)):
        child = os.fork()
        if not child:
            asyncio.run(ask(url))
            sys.exit()
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()

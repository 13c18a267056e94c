"""Processes that ask a boundary with the client for asyncio, and end at once.

Run as `python boundary_exits.py <boundary's url> <how many>`. They are forked, so that importing takes its time once.
How each ended is written out, a line each.
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

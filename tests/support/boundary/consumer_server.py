"""A boundary process that records every connection it opens itself.

Run as `python -m tests.support.boundary.consumer_server <data directory> <file for the records> [<port>]`; it ends when
its input ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from onceward.boundary.boundary import Boundary
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from tests.support.boundary.in_process import serving


async def main(directory: str, notes: Path, port: int = 0) -> None:
    store = SqliteBoundaryStore(directory)
    async with serving(Boundary(store), port=port) as url:
        notes.write_text("listening\n")

        def note(event: str, args: tuple[Any, ...]) -> None:
            if event == "socket.connect":
                with notes.open("a") as file:
                    file.write(f"{args[1]}\n")

        sys.addaudithook(note)
        sys.stdout.write(url + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])))

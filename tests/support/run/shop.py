"""An app for the tests of `onceward run`, copied into its own directory. Each message says how to handle it.

RUN_MODE: `threads` or `asyncio`. RUN_SOURCE: the source. Each message is a line in begun.txt when it begins, and in
done.txt when it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from onceward import Onceward

app = Onceward("shop")
SOURCE = os.environ.get("RUN_SOURCE", "sqlite:///orders.db?lease=30")
POLICY = {
    "loop": {"concurrency": {"value": 4}, "empty_queue": {"backoff": 0.02, "backoff_cap": 0.1}},
    "steps": {"process": {"retry": {"timeout": float(os.environ.get("RUN_TIMEOUT", "60"))}}},
}


def note(file: str, order: dict[str, Any]) -> None:
    with Path(file).open("a") as lines:
        lines.write(f"{order['id']}\n")


def before(order: dict[str, Any]) -> None:
    note("begun.txt", order)
    if order.get("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    if order.get("deaf"):  # blocks its thread, or the whole event loop
        end = time.monotonic() + order["deaf"]
        while time.monotonic() < end:
            try:
                time.sleep(0.05)
            except BaseException:
                continue
    if order.get("fail"):
        raise RuntimeError("as it was asked")


if os.environ.get("RUN_MODE") == "asyncio":

    @app.consumer(SOURCE, policy=POLICY)
    async def charge(order: dict) -> None:  # type: ignore[type-arg]
        before(order)
        await asyncio.sleep(order.get("seconds", 0))
        note("done.txt", order)

else:

    @app.consumer(SOURCE, policy=POLICY)
    def charge(order: dict) -> None:  # type: ignore[type-arg]
        before(order)
        end = time.monotonic() + order.get("seconds", 0)
        while time.monotonic() < end:  # in short pieces, because a thread is interrupted between them
            time.sleep(0.02)
        note("done.txt", order)

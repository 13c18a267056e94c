"""Time for JetStream, whose server has its own clock: an observer that ends leases and delays when they are due.

It sees every delivery and every answer to one on the wire. When a test lets time pass, it tells the server to deliver
again what would be due by then, which is what the server itself does when an ack wait is over.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import nats
from nats.aio.msg import Msg

from onceward._nats.wire import nats_loop
from tests.support.wait import LIMIT

SECOND = 1_000_000_000


class JetStreamTime:
    """Of one stream."""

    def __init__(self, url: str, stream: str) -> None:
        self._url = url
        self._stream = stream
        self.now = 0.0
        self.lease = 60.0
        self._due: dict[int, tuple[float, str]] = {}
        """When messages are delivered again, and the reply subject of their last delivery, by sequence."""

    def advance(self, seconds: float) -> None:
        self._run(self._advance(seconds))

    def start(self) -> None:
        self._run(self._start())

    def stop(self) -> None:
        self._run(self._nats.close())

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, nats_loop()).result(2 * LIMIT)

    async def _start(self) -> None:
        self._nats = await nats.connect(self._url, connect_timeout=int(LIMIT))
        await self._nats.subscribe("_INBOX.>", cb=self._on_delivery)
        await self._nats.subscribe(f"$JS.ACK.{self._stream}.>", cb=self._on_answer)
        await self._nats.flush()

    async def _advance(self, seconds: float) -> None:
        await self._see_all()
        self.now += seconds
        for _, (due, reply) in sorted(self._due.items()):
            if due <= self.now:
                await self._nats.request(reply, b"-NAK", timeout=LIMIT)
        await self._see_all()

    async def _see_all(self) -> None:
        await self._nats.flush()
        while any(each.pending_msgs for each in self._nats._subs.values()):
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _on_delivery(self, message: Msg) -> None:
        if message.reply.startswith(f"$JS.ACK.{self._stream}."):
            self._due[_sequence(message.reply)] = (self.now + self.lease, message.reply)

    async def _on_answer(self, message: Msg) -> None:
        seq, answer = _sequence(message.subject), message.data
        known = self._due.get(seq)
        if known is None:
            return
        if answer.startswith((b"+ACK", b"+TERM")):
            del self._due[seq]
        elif answer == b"+WPI":
            self._due[seq] = (self.now + self.lease, known[1])
        else:
            delay = json.loads(answer[5:] or b'{"delay": 0}')["delay"] / SECOND
            self._due[seq] = (self.now + delay, known[1])


def _sequence(reply: str) -> int:
    return int(reply.split(".")[5])


@contextmanager
def observed(url: str, stream: str) -> Iterator[JetStreamTime]:
    made = JetStreamTime(url, stream)
    made.start()
    try:
        yield made
    finally:
        made.stop()

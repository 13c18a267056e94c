"""Commands that many send at once, in few round trips: whoever comes while one is under way goes with the next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from onceward.connectors.redis_streams.core import Command


def _first_error(replies: Sequence[Any]) -> BaseException | None:
    return next((reply for reply in replies if isinstance(reply, Exception)), None)


class _Parcel:
    """What one caller sends, and the end it waits for."""

    __slots__ = ("commands", "error", "sent")

    def __init__(self, commands: Sequence[Command], sent: Any) -> None:
        self.commands = commands
        self.sent = sent
        self.error: BaseException | None = None


class Coalescer:
    """In threads: the first caller sends for all who come meanwhile."""

    def __init__(self, send: Callable[[Sequence[Command]], list[Any]]) -> None:
        self._send = send
        self._waiting: list[_Parcel] = []
        self._lock = threading.Lock()
        self._under_way = False

    def send(self, commands: Sequence[Command]) -> None:
        if not commands:
            return
        parcel = _Parcel(commands, threading.Event())
        with self._lock:
            self._waiting.append(parcel)
            leads, self._under_way = not self._under_way, True
        if leads:
            self._send_all()
        parcel.sent.wait()
        if parcel.error is not None:
            raise parcel.error

    def _send_all(self) -> None:
        while True:
            with self._lock:
                parcels, self._waiting = self._waiting, []
                if not parcels:
                    self._under_way = False
                    return
            try:
                replies = self._send([command for parcel in parcels for command in parcel.commands])
            except BaseException as error:  # noqa: BLE001  everybody's; nobody may wait for ever
                for parcel in parcels:
                    parcel.error = error
            else:
                _hand_over(parcels, replies)
            for parcel in parcels:
                parcel.sent.set()


class AsyncCoalescer:
    """In asyncio: one task sends for all who come in the same turn of the event loop, and meanwhile.

    A caller that is cancelled does not keep the others from being sent; its own commands go, too.
    """

    def __init__(self, send: Callable[[Sequence[Command]], Awaitable[list[Any]]]) -> None:
        self._send = send
        self._waiting: list[_Parcel] = []
        self._sender: asyncio.Task[None] | None = None

    async def send(self, commands: Sequence[Command]) -> None:
        if not commands:
            return
        parcel = _Parcel(commands, asyncio.get_running_loop().create_future())
        self._waiting.append(parcel)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all())
        await asyncio.shield(parcel.sent)
        if parcel.error is not None:
            raise parcel.error

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                parcels, self._waiting = self._waiting, []
                try:
                    replies = await self._send([command for parcel in parcels for command in parcel.commands])
                except BaseException as error:  # noqa: BLE001
                    for parcel in parcels:
                        parcel.error = error
                else:
                    _hand_over(parcels, replies)
                for parcel in parcels:
                    parcel.sent.set_result(None)
        finally:
            self._sender = None


def _hand_over(parcels: Sequence[_Parcel], replies: Sequence[Any]) -> None:
    at = 0
    for parcel in parcels:
        parcel.error = _first_error(replies[at : at + len(parcel.commands)])
        at += len(parcel.commands)

"""What JetStream sends in several messages: a page for one request, and the answers to many."""

from __future__ import annotations

import asyncio

from nats.aio.msg import Msg

NO_RESPONDERS = "503"


class NatsPage:
    """Messages being received. Each names the one before it, so none can be lost unnoticed."""

    __slots__ = ("_error", "_last", "_messages", "whole")

    def __init__(self, error: type[Exception]) -> None:
        self._error = error
        self.whole: asyncio.Future[list[Msg]] = asyncio.get_running_loop().create_future()
        self._messages: list[Msg] = []
        self._last = "0"

    def take(self, message: Msg) -> None:
        if self.whole.done():
            return
        headers = message.headers or {}
        status = "" if message.data else headers.get("Status", "")
        if status == "404":  # no messages
            self.whole.set_result([])
        elif status not in ("", "204"):
            self.whole.set_exception(self._error(f"cannot read the page now: {headers}; try again"))
        elif headers.get("Nats-Last-Sequence") != self._last:
            self.whole.set_exception(self._error("messages of the page were lost in transit; try again"))
        elif status:
            self.whole.set_result(self._messages)
        else:
            self._last = headers["Nats-Sequence"]
            self._messages.append(message)


class NatsReplies:
    """Answers to this many messages; their content does not matter."""

    __slots__ = ("_error", "_missing", "all")

    def __init__(self, count: int, error: type[Exception]) -> None:
        self.all: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._missing = count
        self._error = error

    def take(self, message: Msg) -> None:
        self._missing -= 1
        if self.all.done():
            return
        if not message.data and message.headers and message.headers.get("Status") == NO_RESPONDERS:
            self.all.set_exception(
                self._error(
                    "nobody answers for the stream or its consumer now: it was deleted, or NATS is starting"
                )
            )
        elif self._missing == 0:
            self.all.set_result(None)

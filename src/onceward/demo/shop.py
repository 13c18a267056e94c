"""The shop's side: sends orders to its boundary through the producer engine, in its own thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock
from typing import Self

from onceward import Transaction
from onceward.boundary import BoundaryClient
from onceward.connectors.boundary import BoundaryConnector
from onceward.demo.setup import SHOP, WAREHOUSE, Setup
from onceward.demo.tasks import SendOrder, producing


class Tally:
    """A thread-safe counter."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = Lock()

    def add(self) -> None:
        with self._lock:
            self.count += 1


class Sending:
    """Sends all messages; at the `pause_at`-th it waits for `resume`. Ends with the `with` block."""

    def __init__(self, setup: Setup, messages: Sequence[Transaction], url: str, pause_at: int) -> None:
        self._policy = producing(setup)
        self._messages = messages
        self._pause_at = pause_at
        self._resumed = Event()
        self._tally = Tally()
        self._client = BoundaryClient(url)
        shop = BoundaryConnector(self._client, from_zone=SHOP, to_zone=WAREHOUSE)
        self._task = SendOrder(connectors={"shop": shop}, services={"tally": self._tally})
        self._thread = ThreadPoolExecutor(1, "sending")

    def __enter__(self) -> Self:
        self._sent = self._thread.submit(self._task.produce_transactions, self._paced(), self._policy)
        return self

    def __exit__(self, *_: object) -> None:
        self._task.stop()
        self.resume()
        self._thread.shutdown()
        self._client.close()

    @property
    def produced(self) -> int:
        """How many messages were sent and acknowledged."""
        return self._tally.count

    def resume(self) -> None:
        self._resumed.set()

    def check(self) -> None:
        """Raise the error that ended it, if any."""
        if self._sent.done():
            self._sent.result()

    def _paced(self) -> Iterator[Transaction]:
        for number, message in enumerate(self._messages):
            if number == self._pause_at:
                self._resumed.wait()
            yield message

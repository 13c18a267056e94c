"""What both connectors to JetStream share: their settings, and the queue behind them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from onceward._nats.wire import AsyncNatsWire, BlockingNatsWire
from onceward._secrets import remember
from onceward._sync import run_blocking
from onceward.connectors.jetstream.queue import JetStreamQueue
from onceward.connectors.lease_rules import LeaseRules, LeaseSettings
from onceward.errors import ConfigurationError
from onceward.transaction import Settlement, Transaction, Verdict

_NAME = re.compile(r"[^\s.*>/\\]{1,128}")


class JetStreamBase:
    """Base of both connectors. See `LeaseRules` for the settings.

    `subject` is where to publish, if the stream takes more than one. `options` are more arguments of `nats.connect`,
    such as `user_credentials` or `tls`.
    """

    def __init__(
        self,
        wire: BlockingNatsWire | AsyncNatsWire,
        url: str,
        stream: str,
        consumer: str = "onceward",
        *,
        subject: str | None = None,
        options: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        **settings: Unpack[LeaseSettings],
    ) -> None:
        if not isinstance(url, str):
            raise ConfigurationError(f"pass the URL of NATS, not {type(url).__qualname__}")
        for name, value in (("stream", stream), ("consumer", consumer)):
            if not isinstance(value, str) or not _NAME.fullmatch(value):
                raise ConfigurationError(
                    f"{name} must be a name without spaces, dots, slashes, * and >, not {value!r}"
                )
        remember(url)
        rules = LeaseRules(**settings)
        self.lease = rules.lease
        self._wire = wire
        self._queue = JetStreamQueue(url, stream, consumer, subject, rules, options or {}, clock)

    @property
    def owner(self) -> str | None:
        return self._queue.owner

    @owner.setter
    def owner(self, name: str) -> None:
        self._queue.owner = name

    def leave_poison_to_inbox(self) -> None:
        """See `InboxLeaseRules`. An inbox calls this."""
        self._queue.rules = self._queue.rules.beside_inbox()

    def _check(self, batch_size: int, extra: dict[str, Any]) -> None:
        if extra:
            raise TypeError(f"{type(self).__name__} has no fetch option {', '.join(map(repr, extra))}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, not {batch_size}")

    def is_suspect(self, transaction: Transaction, /) -> bool:
        """See `onceward.connectors.base`."""
        return self._queue.is_suspect(transaction)

    def extend_from_thread(self, transactions: Sequence[Transaction], /) -> None:
        """See `AsyncConnector.extend_from_thread`."""
        ours = self._queue.fetched_here(transactions)
        run_blocking(BlockingNatsWire().run(self._queue.extend(ours)))

    async def _give_back(self, taken: Sequence[Transaction]) -> None:
        """What a fetch has taken that nobody waits for any more."""
        await self._queue.settle([Settlement(transaction, Verdict.RETURNED) for transaction in taken])

    async def _return_ready(self, _: bool) -> None:
        """What a wait has taken that nobody fetches any more."""
        await self._queue.return_ready()

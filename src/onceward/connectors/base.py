"""The contract between engines and wires: two protocols of five methods, specified by their docstrings.

Anything with `fetch_transactions` (or `fetch_transactions_async`) is a source; the engine uses the other
methods if they exist. If it also has

    await_transactions(seconds) -> bool          (await_transactions_async)

the engine calls that after an empty fetch, instead of sleeping for the backoff of its policy, unless the policy sets
`empty_queue`. It returns True as soon as a fetch may find something, and False after `seconds` at the latest, or when
the engine's call is stopped. It may return True in vain, and False early. A message does not count as delivered before
it is fetched: what the wire cannot wait for without taking it is kept for the next fetch, and given back without one.

A connector may also have a method `is_suspect(transaction)`: whether this message, fetched by itself, may be what kills
its processes. The engine then lets what is in flight end first, and fetches nothing until this one has ended.

It may have an attribute `owner`, set before the first fetch, and a method
`release_owner(owner)` that ends all leases of that owner at once and counts them as lost: `onceward run` calls it
when a worker is dead. Without it they end by themselves. A connector whose queue may be in the inbox's database can
have messages leave it in the transactions of their handlers: see `onceward.inbox.sessions.acknowledgment`.
`onceward.testing.connectors.ConnectorConformance` checks an implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

from onceward.errors import OncewardError
from onceward.transaction import Settlement, Transaction


class ConnectorClosedError(OncewardError):
    """The connector was closed; create a new one to continue."""


class Closing:
    """A connector that is closed at the end of its `with` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClosing:
    """A connector that is closed at the end of its `async with` block."""

    async def close_async(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()


class Connector(Protocol):
    """A wire for threads. Every method may be called from any thread, also concurrently."""

    lease: float
    """Seconds a delivery is reserved for its consumer. The engine extends it three times in that span."""

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """Take at most `batch_size` transactions, oldest available first.

        Blocks: briefly, one second at most; outcomes of earlier work wait meanwhile. Empty: returns an
        empty sequence; a wire that cannot get its turn raises instead. Idempotent: no, each call is a new
        delivery; its count is durable before the call returns. Crash: a message that was fetched but not
        settled is delivered again when its lease expires; the lease counts as lost once a newer delivery owns
        the message. After close: raises `ConnectorClosedError`.
        """
        ...

    def dispatch_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Send these, all or none, in this order.

        Blocks: until they are as durable as this wire makes them. Idempotent: no; sending an id twice makes
        two deliveries, and deduplication is up to the consumer. A payload that would not come back equal
        raises `PayloadError`, and nothing is sent. After close: raises.
        """
        ...

    def settle_transactions(self, settlements: Sequence[Settlement], /) -> None:
        """Record outcomes of deliveries this connector made, all or none.

        Blocks: until durable. Idempotent: yes. An outcome for a delivery whose lease was lost changes
        nothing and is logged: a newer delivery owns the message. Order does not matter. After close: raises.
        """
        ...

    def extend_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Keep these deliveries for another `lease` seconds from now.

        Idempotent: yes. A delivery whose lease was lost stays lost, and is logged; a settled one is
        skipped. After close: raises.
        """
        ...

    def close(self) -> None:
        """Close the wire. Idempotent. Unsettled deliveries come back when their leases expire."""
        ...


class AsyncConnector(Protocol):
    """A wire for asyncio: the same contract, awaited. A canceled call takes effect completely or not at all."""

    lease: float

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """As `Connector.fetch_transactions`."""
        ...

    async def dispatch_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """As `Connector.dispatch_transactions`."""
        ...

    async def settle_transactions_async(self, settlements: Sequence[Settlement], /) -> None:
        """As `Connector.settle_transactions`."""
        ...

    async def extend_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """As `Connector.extend_transactions`.

        A connector may also have `extend_from_thread(transactions)`, a plain method that blocks. While a handler blocks
        the event loop, the engine calls it from another thread, so leases do not expire. It must not need the event
        loop, and skips transactions that were not fetched here.
        """
        ...

    async def close_async(self) -> None:
        """As `Connector.close`."""
        ...

"""The seam between engines and wires: two protocols of five methods, whose docstrings are the contract.

Anything with `fetch_transactions` (or `fetch_transactions_async`) is a source; the engine uses the other
methods where they exist. `onceward.testing.ConnectorConformance` checks an implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from onceward.errors import OncewardError
from onceward.transaction import Settlement, Transaction


class ConnectorClosedError(OncewardError):
    """The connector was closed; make a new one to go on."""


class Connector(Protocol):
    """A wire for threads. Every method may be called from any thread, one call at a time or several."""

    lease: float
    """Seconds a delivery is kept from others. The engine extends it three times in that span."""

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """Take at most `batch_size` transactions, oldest available first.

        Blocks: briefly, one second at the most; outcomes of earlier work wait meanwhile. Empty: returns an
        empty sequence; a wire that cannot get its turn raises instead. Idempotent: no, each call is a new
        delivery; its count is durable before the call returns. Crash: what was fetched and not settled is
        delivered again when its lease runs out; the lease counts as lost once another delivery has taken it.
        After close: raises `ConnectorClosedError`.
        """
        ...

    def dispatch_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Hand these on, all or none, in this order.

        Blocks: until they are as durable as this wire makes them. Idempotent: no; the same id twice is two
        deliveries, and deduplication is the consumer's. A payload that would not come back equal is
        refused with `PayloadError`, and nothing is sent. After close: raises.
        """
        ...

    def settle_transactions(self, settlements: Sequence[Settlement], /) -> None:
        """Take outcomes of deliveries this connector made, all or none.

        Blocks: until durable. Idempotent: yes. An outcome for a delivery whose lease was lost changes
        nothing and is logged: another delivery has the say. Order does not matter. After close: raises.
        """
        ...

    def extend_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Keep these deliveries for another `lease` seconds, counted from now.

        Idempotent: yes. A delivery whose lease was lost stays lost, and is logged; one that was settled is
        passed over. After close: raises.
        """
        ...

    def close(self) -> None:
        """Let go of the wire. Idempotent. Unsettled deliveries come back when their leases run out."""
        ...


class AsyncConnector(Protocol):
    """A wire for asyncio: the same contract, awaited. A cancelled call has happened or not, never half."""

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
        """As `Connector.extend_transactions`."""
        ...

    async def close_async(self) -> None:
        """As `Connector.close`."""
        ...

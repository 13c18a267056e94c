"""The boundary connector under the connector suite, on a real server.

The suite sends any transaction, but a boundary keeps facts: here each transaction is the object of a fact. Tests that
contradict a boundary are left out; `tests/integration/connectors/test_boundary.py` has what holds instead.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

import pytest

from onceward.boundary import AsyncBoundaryClient, BoundaryClient, envelope_for, fact_of
from onceward.boundary.model import StoredFact
from onceward.connectors.boundary import AsyncBoundaryConnector, BoundaryConnector
from onceward.connectors.boundary.base import Facts
from onceward.connectors.codec import encode_all
from onceward.testing.connectors import ConnectorConformance
from onceward.transaction import Transaction
from tests.support.boundary.server import boundary_server


class Whole:
    """A connector whose facts carry the bytes of a transaction and have their own ids, because the suite sends the same
    transaction many times. All have one subject, so they are in order."""

    def _facts_of(self, transactions: Sequence[Transaction]) -> Facts:
        facts = []
        for body in encode_all(transactions):
            envelope = envelope_for(uuid4().hex, from_zone="a", to_zone="b")
            facts.append((envelope, fact_of("test:suite", "sent", base64.b64encode(body).decode())))
        return facts

    def _body_of(self, stored: StoredFact) -> bytes:
        return base64.b64decode(stored.fact.object)


class WholeConnector(Whole, BoundaryConnector):
    pass


class AsyncWholeConnector(Whole, AsyncBoundaryConnector):
    pass


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with boundary_server(tmp_path_factory.mktemp("boundary")) as made:
        yield made


class OnABoundary(ConnectorConformance):
    kind: Any

    @pytest.fixture(autouse=True)
    def with_a_client(self, url: str) -> Iterator[None]:
        self.name = f"suite-{uuid4().hex}"
        with BoundaryClient(url) as client:
            while page := client.fetch(self.name, 1000).facts:  # an empty queue is a cursor at the end
                client.confirm(self.name, page[-1].offset)
            if self.kind is WholeConnector:
                self.client: Any = client
                yield
            else:
                self.client = AsyncBoundaryClient(url)
                yield
                asyncio.run(self.client.close())

    def make(self, clock: Any, **settings: Any) -> Any:
        made = self.kind(self.client, self.name, clock=clock, **settings)
        made.bury_failures()
        return made

    def make_waiting(self, **settings: Any) -> Any:
        return self.make(None, **settings)

    # No `reopen`: leases are in memory, and another connector with that name gets the same facts at once.
    # For the suite, the bytes of a transaction travel here: see tests/unit/connectors/test_boundary_facts.py.
    test_every_transaction_comes_back_equal = None
    test_one_bad_payload_keeps_the_whole_dispatch_from_happening = None
    test_credentials_in_metadata_are_refused = None
    test_the_current_trace_goes_along = None
    test_without_a_trace_the_metadata_travels_as_it_is = None
    # A known id is not appended again.
    test_the_same_id_twice_is_two_deliveries = None
    # Each append is a separate call.
    test_concurrent_dispatchers_keep_their_batches_whole = None


class TestBoundaryConnector(OnABoundary):
    kind = WholeConnector


class TestAsyncBoundaryConnector(OnABoundary):
    kind = AsyncWholeConnector


del OnABoundary

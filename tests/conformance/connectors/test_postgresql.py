"""A PostgreSQL queue under the connector suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from onceward.connectors.base import AsyncConnector, Connector
from onceward.connectors.postgresql import AsyncPostgreSqlConnector, PostgreSqlConnector
from onceward.testing import FakeClock
from onceward.testing.connectors import ConnectorConformance
from tests.conformance.connectors.test_connectors import put_raw
from tests.support.schema import new_schema


class OnPostgres:
    """The server has its own clock: time passes by making leases and delays older."""

    releases = True

    @pytest.fixture(autouse=True)
    def in_a_schema_of_its_own(self, postgres_url: str) -> Iterator[None]:
        with new_schema(postgres_url) as self.schema:
            yield

    def advance(self, clock: FakeClock, seconds: float) -> None:
        name = self.schema.name
        self.schema.execute(
            f"UPDATE {name}.onceward_queue_messages SET leased_until = leased_until - {seconds} WHERE leased_until > 0"
        )
        self.schema.execute(f"UPDATE {name}.onceward_queue_delayed SET visible_at = visible_at - {seconds}")

    def cut(self, connector: Any) -> None:
        self.schema.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'onceward-queue'"
        )

    put_raw = staticmethod(put_raw)


class TestPostgreSqlConnector(OnPostgres, ConnectorConformance):
    def make(self, clock: Any, **settings: Any) -> Connector:
        return PostgreSqlConnector(self.schema.plain_url, "orders", **settings)

    def reopen(self, connector: Connector, clock: Any, **settings: Any) -> Connector:
        return self.make(clock, **settings)


class TestAsyncPostgreSqlConnector(OnPostgres, ConnectorConformance):
    def make(self, clock: Any, **settings: Any) -> AsyncConnector:
        return AsyncPostgreSqlConnector(self.schema.plain_url, "orders", **settings)

    def reopen(self, connector: AsyncConnector, clock: Any, **settings: Any) -> AsyncConnector:
        return self.make(clock, **settings)

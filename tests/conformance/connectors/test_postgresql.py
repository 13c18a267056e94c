"""A PostgreSQL queue under the connector suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from onceward.connectors.base import AsyncConnector, Connector
from onceward.connectors.postgresql import AsyncPostgreSqlConnector, PostgreSqlConnector
from onceward.testing import FakeClock
from onceward.testing.connectors import ConnectorConformance
from tests.conformance.connectors.test_connectors import put_raw
from tests.support.schema import Schema, new_schema

pytestmark = pytest.mark.req("PG-02")


@pytest.fixture(scope="module")
def shared_schema(postgres_url: str) -> Iterator[Schema]:
    with new_schema(postgres_url) as made:
        yield made


class OnPostgres:
    """The server has its own clock: time passes by making leases and delays older. All tests share the tables, and each
    has its own queue."""

    releases = True

    @pytest.fixture(autouse=True)
    def on_a_queue_of_its_own(self, shared_schema: Schema) -> None:
        self.schema = shared_schema
        self.name = uuid4().hex

    def advance(self, clock: FakeClock, seconds: float) -> None:
        tables = f"{self.schema.name}.onceward_queue"
        mine = f"queue = '{self.name}'"
        self.schema.execute(
            f"UPDATE {tables}_messages SET leased_until = leased_until - {seconds} WHERE {mine} AND leased_until > 0"
        )
        self.schema.execute(f"UPDATE {tables}_delayed SET visible_at = visible_at - {seconds} WHERE {mine}")

    def cut(self, connector: Any) -> None:
        self.schema.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'onceward-queue'"
        )

    def make_waiting(self, **settings: Any) -> Any:
        return self.make(None, **settings)  # type: ignore[attr-defined]

    put_raw = staticmethod(put_raw)


class TestPostgreSqlConnector(OnPostgres, ConnectorConformance):
    def make(self, clock: Any, **settings: Any) -> Connector:
        return PostgreSqlConnector(self.schema.plain_url, self.name, **settings)

    def reopen(self, connector: Connector, clock: Any, **settings: Any) -> Connector:
        return self.make(clock, **settings)


class TestAsyncPostgreSqlConnector(OnPostgres, ConnectorConformance):
    def make(self, clock: Any, **settings: Any) -> AsyncConnector:
        return AsyncPostgreSqlConnector(self.schema.plain_url, self.name, **settings)

    def reopen(self, connector: AsyncConnector, clock: Any, **settings: Any) -> AsyncConnector:
        return self.make(clock, **settings)

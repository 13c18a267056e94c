"""PostgreSQL: a role that cannot add partitions is refused when a consumer starts, not with each event of a new day."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, make_url

from onceward import Transaction
from onceward.errors import ConfigurationError
from onceward.inbox import Handling, Inbox
from onceward.run.outages import is_outage
from tests.support.deadletters.world import contract
from tests.support.schema import Schema, new_schema

pytestmark = pytest.mark.req("CC-090")


class Place:
    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.owner = create_engine(schema.url, connect_args=schema.connect_args)
        Inbox(self.owner).migrate()
        Inbox(self.owner).register(contract())
        self.role = f"poor_{uuid4().hex[:8]}"
        self.do(
            f"CREATE ROLE {self.role} LOGIN PASSWORD 'x'",
            f"GRANT USAGE ON SCHEMA {schema.name} TO {self.role}",
            f"GRANT ALL ON ALL TABLES IN SCHEMA {schema.name} TO {self.role}",
        )

    def do(self, *statements: str) -> None:
        for each in statements:
            self.schema.execute(each)

    def consume(self) -> Handling:
        url = make_url(self.schema.url).set(username=self.role, password="x")
        engine: Engine = create_engine(url, connect_args=self.schema.connect_args)
        try:
            event = Transaction(payload={}, metadata={"event_type": "order.paid"})
            return Inbox(engine).process(contract(), event, lambda *_: None).handling
        finally:
            engine.dispose()


@pytest.fixture
def place(postgres_url: str) -> Iterator[Place]:
    with new_schema(postgres_url) as schema:
        made = Place(schema)
        yield made
        made.owner.dispose()
        made.do(f"DROP OWNED BY {made.role} CASCADE", f"DROP ROLE {made.role}")


def test_a_role_that_cannot_add_partitions_does_not_start(place: Place) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"the role '{place.role}' does not own onceward_dedup.*GRANT "
    ):
        place.consume()
    [[owner]] = place.schema.execute("SELECT current_user")
    place.do(f"GRANT {owner} TO {place.role}")
    assert place.consume() is Handling.DONE


@pytest.mark.req("CC-194")
@pytest.mark.parametrize("creates", [False, True])
def test_a_role_that_only_reads_is_refused_and_not_retried(place: Place, creates: bool) -> None:
    place.do(
        f"REVOKE ALL ON ALL TABLES IN SCHEMA {place.schema.name} FROM {place.role}",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA {place.schema.name} TO {place.role}",
    )
    if creates:
        place.do(f"GRANT CREATE ON SCHEMA {place.schema.name} TO {place.role}")
    url = make_url(place.schema.url).set(username=place.role, password="x")
    engine = create_engine(url, connect_args=place.schema.connect_args)
    act = Inbox(engine).register if creates else lambda _: Inbox(engine).migrate()
    with pytest.raises(
        ConfigurationError, match="may not write to the tables of onceward: permission denied"
    ) as refused:
        act(contract())
    assert not is_outage(refused.value)
    engine.dispose()

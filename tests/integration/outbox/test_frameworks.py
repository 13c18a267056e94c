"""Django's connections and Alembic's revisions, as the guides have them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, text

from onceward import Onceward
from onceward.inbox import Inbox
from onceward.outbox import OutboxError
from tests.support import ROOT
from tests.support.outbox import OutboxWorld, outbox
from tests.support.schema import new_schema

__all__ = ["outbox"]


@pytest.fixture
def django(outbox: OutboxWorld) -> Iterator[Any]:
    """A connection of Django's to the same database."""
    from django import setup
    from django.conf import settings
    from django.db import connections
    from django.db.utils import ConnectionHandler

    if not settings.configured:
        settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.dummy"}}, USE_TZ=True)
        setup()
    url = outbox.engine.url
    engine = {"sqlite": "sqlite3", "postgresql": "postgresql"}[url.get_backend_name()]
    options = {} if engine == "sqlite3" else {key: value for key, value in url.query.items() if key != "host"}
    database = {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": url.database,
        "USER": url.username or "",
        "HOST": url.query.get("host") or url.host or "",
        "OPTIONS": options,
    }
    connections["default"] = connection = ConnectionHandler({"default": database})["default"]
    try:
        yield connection
    finally:
        connection.close()
        del connections["default"]


@pytest.mark.req("OB-22")
def test_a_send_commits_with_the_transaction_of_django(outbox: OutboxWorld, django: Any) -> None:
    from django.db.transaction import atomic

    send = outbox.app.outbox(django).send
    with pytest.raises(OutboxError, match=r"no transaction is open.*transaction\.atomic\(\)"):
        send("memory://ship", "before")
    with atomic():
        sent = send("memory://ship", "one")
        with suppress(RuntimeError), atomic():
            send("memory://ship", "in a savepoint")
            raise RuntimeError
    with suppress(RuntimeError), atomic():
        send("memory://ship", "two")
        raise RuntimeError
    assert outbox.rows("message_id") == [sent]
    with atomic():
        assert outbox.app.outbox(django).cancel(sent)
    assert outbox.rows("message_id") == []


@pytest.mark.req("OB-22")
def test_the_alembic_recipe_creates_the_tables(tmp_path: Path, postgres_url: str) -> None:
    page = (ROOT / "docs/how-to/outbox.md").read_text("utf-8")
    [recipe] = re.findall(r"```python title=\"0007_onceward\.py\"\n(.*?)```", page, re.DOTALL)
    versions = tmp_path / "versions"
    versions.mkdir()
    first = 'revision = "0006_orders"\ndown_revision = None\n\n\ndef upgrade():\n    pass\n'
    (versions / "0006_orders.py").write_text(first)
    (versions / "0007_onceward.py").write_text(recipe)
    (tmp_path / "env.py").write_text(
        "from alembic import context\n"
        "connection = context.config.attributes['connection']\n"
        "context.configure(connection=connection)\n"
        "with context.begin_transaction():\n"
        "    context.run_migrations()\n"
    )
    with new_schema(postgres_url) as schema:
        engine = create_engine(schema.plain_url.replace("postgresql://", "postgresql+psycopg://", 1))
        config = Config(attributes={})
        config.set_main_option("script_location", str(tmp_path))
        config.set_main_option("path_separator", "os")
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        assert Inbox(engine).migrate() == []
        app = Onceward("shop", database=schema.plain_url)
        with engine.begin() as connection:
            sent = app.outbox(connection).send("memory://ship", 1)
            found = connection.execute(text("SELECT message_id FROM onceward_outbox")).scalars().all()
        assert found == [sent]
        engine.dispose()

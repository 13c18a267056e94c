"""Django's connections and Alembic's revisions, as the guides have them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
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
        send("redis://x/ship", "before")
    with atomic():
        sent = send("redis://x/ship", "one")
        with suppress(RuntimeError), atomic():
            send("redis://x/ship", "in a savepoint")
            raise RuntimeError
    with suppress(RuntimeError), atomic():
        send("redis://x/ship", "two")
        raise RuntimeError
    assert outbox.rows("message_id") == [sent]
    with atomic():
        assert outbox.app.outbox(django).cancel(sent)
    assert outbox.rows("message_id") == []


@pytest.mark.req("OB-22")
def test_without_autocommit_a_send_opens_a_transaction_of_django(outbox: OutboxWorld, django: Any) -> None:
    django.set_autocommit(False)
    sent = outbox.app.outbox(django).send("redis://x/ship", "one")
    assert outbox.rows("message_id") == []
    django.commit()
    outbox.app.outbox(django).send("redis://x/ship", "two")
    django.rollback()
    assert outbox.rows("message_id") == [sent]


@pytest.fixture
def revisions(tmp_path: Path) -> Config:
    """Those of the guide."""
    [recipe] = re.findall(r"```python title=\"0007_onceward\.py\"\n(.*?)```", page("outbox"), re.DOTALL)
    versions = tmp_path / "versions"
    versions.mkdir()
    first = 'revision = "0006_orders"\ndown_revision = None\n\n\ndef upgrade():\n    pass\n'
    (versions / "0006_orders.py").write_text(first)
    (versions / "0007_onceward.py").write_text(recipe)
    (tmp_path / "env.py").write_text(
        "from alembic import context\n"
        "if context.is_offline_mode():\n"
        "    options = {'dialect_name': 'postgresql', 'dialect_opts': {'paramstyle': 'named'}}\n"
        "else:\n"
        "    options = {'connection': context.config.attributes['connection']}\n"
        "context.configure(**options)\n"
        "with context.begin_transaction():\n"
        "    context.run_migrations()\n"
    )
    config = Config(attributes={})
    config.set_main_option("script_location", str(tmp_path))
    config.set_main_option("path_separator", "os")
    return config


def page(name: str) -> str:
    return (ROOT / f"docs/how-to/{name}.md").read_text("utf-8")


@pytest.mark.req("OB-22")
def test_the_alembic_recipe_creates_the_tables_and_skips_what_is_there(
    revisions: Config, postgres_url: str
) -> None:
    with new_schema(postgres_url) as schema:
        engine = create_engine(schema.plain_url.replace("postgresql://", "postgresql+psycopg://", 1))

        def run(change: Any, to: str) -> None:
            with engine.begin() as connection:
                revisions.attributes["connection"] = connection
                change(revisions, to)

        run(command.upgrade, "head")
        assert Inbox(engine).migrate() == []
        app = Onceward("shop", database=schema.plain_url)
        with engine.begin() as connection:
            sent = app.outbox(connection).send("redis://x/ship", 1)
        run(command.downgrade, "0006_orders")
        run(command.upgrade, "head")
        with engine.begin() as connection:
            found = connection.execute(text("SELECT message_id FROM onceward_outbox")).scalars().all()
        assert found == [sent]
        engine.dispose()


@pytest.mark.req("OB-22")
def test_the_script_of_the_alembic_recipe_creates_the_tables(revisions: Config, postgres_url: str) -> None:
    revisions.output_buffer = script = StringIO()
    command.upgrade(revisions, "head", sql=True)
    with new_schema(postgres_url) as schema:
        engine = create_engine(schema.plain_url.replace("postgresql://", "postgresql+psycopg://", 1))
        with psycopg.connect(schema.plain_url, autocommit=True) as connection:
            connection.execute(script.getvalue().encode())
        assert Inbox(engine).migrate() == []
        engine.dispose()


@pytest.mark.req("OB-22")
def test_the_migration_of_django_creates_the_tables_and_skips_what_is_there(
    outbox: OutboxWorld, django: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.db.migrations.state import ProjectState

    monkeypatch.setitem(sys.modules, "shop_events", SimpleNamespace(shop=outbox.app))
    [recipe] = re.findall(
        r"```python title=\"orders/migrations/0002_onceward\.py\"\n(.*?)```", page("outbox-django"), re.DOTALL
    )
    found: dict[str, Any] = {}
    exec(recipe, found)
    migration = found["Migration"]("0002_onceward", "orders")
    Inbox(outbox.engine).migrate(back_to=10)
    for _ in range(2):
        with django.schema_editor(atomic=migration.atomic) as editor:
            migration.apply(ProjectState(), editor)
        assert outbox.rows() == []
        assert Inbox(outbox.engine).migrate() == []

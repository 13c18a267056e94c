"""No command shows a password of a URL that it was given, whatever it prints."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onceward import _secrets
from tests.support.odd_arguments import Call, call, problem_with

SECRET = "hUnt3rTwo"
DEAD = "127.0.0.1:1"

DATABASES = (
    f"postgresql://u:{SECRET}@{DEAD}/db",
    f"postgresql+psycopg://u:{SECRET}@{DEAD}/db",
    f"postgresql://{DEAD}/db?user=u&password={SECRET}",
    f"postgresql://{DEAD}/db?sslpassword={SECRET}",
    f"postgresql://u:a@{SECRET}@{DEAD}/db",
    f"postgresql://u:a?{SECRET}@{DEAD}/db",
    f"postgresql://u:%zz{SECRET}@{DEAD}/db",
    f"mysql://u:{SECRET}@h/db",
    f"sqlite://u:{SECRET}@h/db",
    f"host={DEAD} password={SECRET}",
)
SOURCES = (
    f"redis://u:{SECRET}@{DEAD}/0/orders",
    f"redis://{DEAD}/orders?password={SECRET}",
    f"redis://u:a?{SECRET}@{DEAD}/orders",
    f"boundary+http://u:{SECRET}@{DEAD}?consumer=x",
    f"boundary+http://{SECRET}@{DEAD}?consumer=x",
    f"rabbit://u:{SECRET}@h/orders",
)
BOUNDARIES = (
    f"http://u:{SECRET}@{DEAD}",
    f"http://{SECRET}@{DEAD}",
    f"http://{DEAD}?token={SECRET}",
    f"http://u:a/{SECRET}@{DEAD}",
    f"ftp://u:{SECRET}@h",
    f"u:{SECRET}@{DEAD}",
)
STORES = (
    *DATABASES[1:3],
    *DATABASES[6:],
    f"nats://u:{SECRET}@h:0",
    f"nats://h:1?token={SECRET}",
    f"tls://{SECRET}@h",
)

OF_DATABASES = (("inbox", "stats"), ("inbox", "migrate"), ("dlq", "list"), ("audit", "list"))
OF_APPS = (("config",), ("config", "--json"), ("explain",), ("balance",), ("balance", "--json"))
OF_BOUNDARIES = (
    ("stats",),
    ("fetch", "--consumer", "c"),
    ("get", "files", "key", "-"),
)
APP = """
from onceward import Onceward

app = Onceward("shop", database={database!r})


@app.consumer({source!r})
def charge(order: dict) -> None: ...
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def shown(arguments: tuple[str, ...]) -> Iterator[str]:
    """What a new process with these arguments prints, if that shows the password or a traceback."""
    _secrets._known.clear()
    _secrets._known_pattern = None
    sys.modules.pop("shop_with_secrets", None)
    result = call(Call((), arguments))
    logging.getLogger("onceward").setLevel(logging.NOTSET)
    if SECRET in result.output or problem_with(result):
        yield f"{arguments}: {result.exception!r} {result.output}"


@pytest.mark.req("ST-05")
@pytest.mark.parametrize("url", DATABASES)
def test_the_password_of_a_database_is_not_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [each for command in OF_DATABASES for each in shown((*command, "--database", url))]
    write_app(url, "sqlite:///orders.db")
    problems += [each for name, *more in OF_APPS for each in shown((name, "shop_with_secrets:app", *more))]
    monkeypatch.setenv("ONCEWARD_DATABASE", url)
    problems += [
        each for name in ("config", "inbox") for each in shown((name, *(["stats"] * (name == "inbox"))))
    ]
    assert problems == []


@pytest.mark.req("ST-05")
@pytest.mark.parametrize("url", SOURCES)
def test_the_password_of_a_source_is_not_shown(url: str) -> None:
    write_app(None, url)
    problems = [each for name, *more in OF_APPS for each in shown((name, "shop_with_secrets:app", *more))]
    problems += shown(("balance", "--source", url))
    assert problems == []


@pytest.mark.req("ST-05")
@pytest.mark.parametrize("url", BOUNDARIES)
def test_the_password_of_a_boundary_is_not_shown(url: str, tmp_path: Path) -> None:
    problems = [each for command in OF_BOUNDARIES for each in shown(("boundary", *command, "--url", url))]
    problems += shown(("boundary", "skip", "--from", url, "--consumer", "c"))
    problems += shown(("boundary", "forward", "--from", url, "--to", "facts", "--zone", "z", "--once"))
    (tmp_path / "b.toml").write_text(f'zone = "z"\n[[links]]\nname = "l"\nurl = "{url}"\n')
    problems += shown(("boundary", "serve", "--config", "b.toml", "--listen", "192.0.2.1:1"))
    assert problems == []


@pytest.mark.req("ST-05")
@pytest.mark.parametrize("url", STORES)
def test_the_password_of_a_store_is_not_shown(url: str) -> None:
    problems = [*shown(("boundary", "serve", "--store", url, "--listen", "192.0.2.1:1"))]
    problems += shown(("boundary", "export", "bundle", "--store", url, "--zone", "z", "--since", "0"))
    problems += shown(("boundary", "copy", "--from", url, "--to", "facts"))
    assert problems == []


@pytest.mark.req("ST-05")
@pytest.mark.parametrize("url", [*DATABASES, *SOURCES, *BOUNDARIES])
def test_the_password_of_a_url_where_none_belongs_is_not_shown(url: str) -> None:
    calls = [
        ("trace", url),
        ("new", url),
        ("dlq", "show", url, "--database", "sqlite:///x.db"),
        ("dlq", "list", "--id", url),
        ("dlq", "list", "--consumer", url, "--database", "sqlite:///x.db"),
        ("boundary", "fetch", "--consumer", url, "--url", f"http://{DEAD}"),
    ]
    if "://" in url:
        calls.append(("new", "shop", "--dir", url))
    assert [each for arguments in calls for each in shown(arguments)] == []


def write_app(database: str | None, source: str) -> None:
    Path("shop_with_secrets.py").write_text(APP.format(database=database, source=source))

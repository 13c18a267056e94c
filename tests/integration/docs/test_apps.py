"""The examples of docs/concepts/apps.md run as written, and its promises about commands hold."""

from __future__ import annotations

import gc
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from onceward.app.settings import AppSettings, resolve
from onceward.connectors.urls import Address
from onceward.verify import examine_consumer
from tests.support import ROOT

PAGE = ROOT / "docs" / "concepts" / "apps.md"
TEXT = PAGE.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
def test_the_examples_run_in_order_and_the_function_can_be_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page_of_apps.py").write_text("\n\n".join(blocks("python")))
    monkeypatch.syspath_prepend(tmp_path)
    page: Any = __import__("page_of_apps")
    for function, scenarios in (
        (page.charge, ["duplicates", "replay"]),
        (page.pay, ["exceptions", "outside-calls"]),
    ):
        report = examine_consumer(function, only=scenarios)
        assert report.passed, str(report)
    assert page.charge.__name__ == "charge"
    gc.collect()  # the page leaves its engine to the garbage collector, as scripts do


def test_the_settings_in_the_example_are_settings(tmp_path: Path) -> None:
    [example] = blocks("toml")
    found = resolve(tomllib.loads(example), {}, tmp_path)
    assert found.settings.consumers["charge"].policy == {"loop": {"batch": {"size": 50}}}
    assert found.settings.producers["place"].sink == "redis://localhost:6379/orders"
    assert found.settings.engine.stuck_grace == 5.0


def test_every_setting_is_described() -> None:
    for name in AppSettings.model_fields:
        assert f"`{name}`" in TEXT or f"`{name}." in TEXT


def test_every_url_of_the_table_is_a_source() -> None:
    for url in re.findall(r"`((?:sqlite|redis|memory)://[^`…]+)`", TEXT):
        Address(url)

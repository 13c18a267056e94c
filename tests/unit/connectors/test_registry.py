"""Schemes: which exist, what they promise, and which modules they do not load."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from onceward.connectors import LEASE_SETTINGS, Address, Scheme, Setting, registry
from onceward.connectors.lease_rules import LeaseRules
from onceward.connectors.registry import BUILT_IN, find_scheme, scheme_names
from onceward.errors import ConfigurationError

DRIVERS = ["redis", "connectrpc", "pyqwest", "sqlalchemy"]


@pytest.mark.req("CN-01")
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_scheme_is_complete_and_knows_its_names(name: str) -> None:
    scheme = find_scheme(name)
    assert scheme is not None
    assert {each for each, module in BUILT_IN.items() if module == BUILT_IN[name]} == set(scheme.names)
    assert scheme.facts is not None
    assert scheme.counts is not None
    assert scheme.settings.items() >= LEASE_SETTINGS.items()


@pytest.mark.req("CN-01")
def test_a_scheme_that_nothing_offers_is_none() -> None:
    assert find_scheme("gopher") is None
    assert scheme_names()[: len(BUILT_IN)] == list(BUILT_IN)


def test_the_settings_of_a_lease_are_those_of_its_rules() -> None:
    defaults = {field.name: field.default for field in msgspec.structs.fields(LeaseRules)}
    assert LEASE_SETTINGS.keys() == defaults.keys()
    for name, value in defaults.items():
        assert LEASE_SETTINGS[name].convert(str(value)) == value


@pytest.mark.parametrize(
    "url",
    ["redis://localhost/orders", "boundary+http://localhost?consumer=c", "sqlite:///o.db", "memory://o"],
)
def test_a_url_is_read_without_any_driver(url: str) -> None:
    code = (
        f"import sys; from onceward.connectors.urls import Address; Address({url!r})\n"
        f"print([name for name in {DRIVERS} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "[]\n"


def _refuse(text: str) -> str:
    raise ValueError(text)


def test_a_setting_that_cannot_be_converted_is_refused_and_a_secret_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"token": Setting(_refuse, "a token"), "size": Setting(int, "a whole number")}
    scheme = Scheme(names=("vault",), settings=settings, open=lambda address, *, asynchronous: None)
    monkeypatch.setitem(registry._installed, "vault", scheme)
    with pytest.raises(ConfigurationError, match=r"size must be a whole number, not 'x'"):
        Address("vault://h?size=x")
    with pytest.raises(ConfigurationError, match=r"token must be a token, not \*\*\*") as refused:
        Address("vault://h?token=hunter2")
    assert "hunter2" not in str(refused.value)


def test_consumers_of_one_place_share_it_unless_a_setting_divides_it() -> None:
    one, other = (Address(f"redis://h/orders?group={name}").queue for name in ("a", "b"))
    assert one != other
    slow = Address("redis://h/orders?group=a&lease=90").queue
    assert slow == one

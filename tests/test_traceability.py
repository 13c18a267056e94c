"""Requirements and the tests that claim them. conftest.py checks that each has a passing test."""

from __future__ import annotations

import subprocess
import tomllib

import pytest

from spec import conformance
from tests.conftest import REQUIREMENT, Traceability

KNOWN = {id_ for entries in conformance.requirements().values() for id_ in entries}


def test_every_claimed_id_exists() -> None:
    assert sorted(conformance.claims().keys() - KNOWN) == []


def test_pending_names_only_lines_that_exist_and_are_not_claimed() -> None:
    assert sorted(conformance.pending() - KNOWN) == []
    claimed = conformance.pending() & conformance.claims().keys()
    assert sorted(claimed) == [], "proven lines must leave spec/pending.toml"


def test_pending_only_shrinks() -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=conformance.ROOT, capture_output=True, text=True, check=False
        ).stdout

    for commit in git("log", "--format=%H", "--", "spec/pending.toml").split():
        text = git("show", f"{commit}:spec/pending.toml")
        if text:
            earlier = set(tomllib.loads(text)["pending"])
            assert sorted(conformance.pending() - earlier) == [], f"not pending in {commit}"


@pytest.mark.parametrize("claims", [["CE-01"], []], ids=["proven", "unproven"])
def test_a_line_that_is_not_pending_needs_a_passing_test(
    request: pytest.FixtureRequest, claims: list[str]
) -> None:
    books = Traceability(request.config)
    for outcome in ("failed", "passed"):
        assert "CE-01" in books.unproven()
        books.pytest_runtest_logreport(report_of(outcome, claims))
    assert ("CE-01" in books.unproven()) == (not claims)


def report_of(outcome: str, claims: list[str]) -> pytest.TestReport:
    properties: list[tuple[str, object]] = [(REQUIREMENT, id_) for id_ in claims]
    return pytest.TestReport("test", ("", None, ""), {}, outcome, None, "call", user_properties=properties)  # type: ignore[arg-type]

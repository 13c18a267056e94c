"""The last word of the suite: every requirement line that is not pending has a test that passed in this run."""

from __future__ import annotations

import subprocess
import tomllib

import pytest

from spec import conformance
from tests.conftest import CLAIMED, PASSED, WHOLE_SUITE

KNOWN = {id_ for entries in conformance.requirements().values() for id_ in entries}


def test_every_claimed_id_exists(request: pytest.FixtureRequest) -> None:
    claimed = request.config.stash[CLAIMED]
    assert sorted(claimed - KNOWN) == []


def test_pending_names_only_lines_that_exist_and_are_not_claimed(request: pytest.FixtureRequest) -> None:
    claimed = request.config.stash[CLAIMED]
    assert sorted(conformance.pending() - KNOWN) == []
    assert sorted(conformance.pending() & claimed) == [], "proven lines must leave spec/pending.toml"


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


@pytest.mark.last
def test_every_line_that_is_not_pending_has_a_passing_test(request: pytest.FixtureRequest) -> None:
    config = request.config
    if not config.stash[WHOLE_SUITE]:
        return  # only part of the suite was asked for
    passed = config.stash[PASSED]
    assert sorted(KNOWN - conformance.pending() - passed) == []

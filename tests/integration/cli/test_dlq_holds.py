"""What `onceward dlq discard`, `hold` and `release` say about letters that they leave as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onceward.cli.main import app
from onceward.deadletters import DeadLetters, Filter
from tests.support.deadletters.world import burial
from tests.support.limits import engine_of
from tests.support.schema import url_of

pytestmark = pytest.mark.req("CC-197")

DISCARD = ["discard", "--yes", "--reason", "by hand"]


class Desk:
    def __init__(self, url: str, letters: DeadLetters) -> None:
        self.url = url
        self.letters = letters

    def run(self, *arguments: str) -> tuple[int, str]:
        """The exit code, and what is printed."""
        environment = {"COLUMNS": "250", "NO_COLOR": "1", "ONCEWARD_DATABASE": self.url}
        done = CliRunner().invoke(app, ["dlq", *arguments], env=environment)
        return done.exit_code, done.output

    def hold(self, *ids: int, reason: str = "case 7", operator: str = "ann") -> None:
        assert self.letters.hold(Filter(ids=ids), reason=reason, operator=operator) == len(ids)


@pytest.fixture(params=["sqlite", "postgresql"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    with (
        url_of(request.param, tmp_path, request) as url,
        engine_of(url.replace("postgresql://", "postgresql+psycopg://", 1)) as engine,
    ):
        letters = DeadLetters(engine)
        letters.migrate()
        letters.bury(*(burial(f"m{number}") for number in range(1, 5)))
        yield Desk(url, letters)


def test_a_letter_on_hold_is_not_discarded_and_the_command_says_why(desk: Desk) -> None:
    desk.hold(3)
    assert desk.run(*DISCARD, "--id", "3") == (
        1,
        "Nothing was discarded: letter 3 is on hold by ann: case 7\n"
        "To discard what is on hold, first release it: `onceward dlq release --id 3 --reason …`\n",
    )
    code, text = desk.run(*DISCARD, "--id", "3", "--json")
    assert (code, "letter 3 is on hold by ann" in text) == (1, True)
    assert json.loads(text[text.index("{") : text.index("}") + 1]) == {"discarded": 0, "on_hold": 1}
    desk.hold(4, operator="ben")
    code, text = desk.run(*DISCARD, "--consumer", "billing")
    assert code == 0
    assert text.startswith("2 letters discarded.\n2 letters are on hold, such as letter 3 by ann: case 7\n")
    assert "`onceward dlq release … --reason …`" in text
    desk.letters.hold(Filter(event_type="order.paid"), reason="case 7", operator="eve")
    assert "letter 4 is on hold by ben or eve: case 7" in desk.run(*DISCARD, "--id", "4")[1]
    assert desk.letters.count(Filter(status="open")) == 2
    assert desk.run("release", "--id", "3", "--reason", "over") == (0, "1 letter released.\n")
    assert desk.run(*DISCARD, "--id", "3") == (0, "1 letter discarded.\n")
    assert desk.run(*DISCARD, "--id", "3") == (
        1,
        "Nothing was discarded: letter 3 is discarded; only open letters can be discarded\n",
    )
    settled = desk.run(*DISCARD, "--id", "1", "--id", "2", "--id", "3")[1]
    assert "of the 3 letters that match, none is open: 3 discarded" in settled
    assert desk.run(*DISCARD, "--consumer", "biling") == (
        1,
        "No letter matches: 'biling' has none; the consumers that do are billing.\n",
    )


def test_only_letters_on_hold_are_released(desk: Desk) -> None:
    desk.hold(1)
    assert desk.run("release", "--id", "2", "--reason", "over") == (
        1,
        "Nothing was released: letter 2 is not on hold\n",
    )
    assert desk.run("release", "--consumer", "billing", "--reason", "over") == (0, "1 letter released.\n")
    code, text = desk.run("release", "--consumer", "billing", "--reason", "over")
    assert (code, "none of the 4 letters that match is on hold" in text) == (1, True)
    assert desk.run("release", "--id", "9", "--reason", "over") == (1, "No letter matches.\n")


def test_a_second_hold_says_what_it_replaces(desk: Desk) -> None:
    desk.hold(1, reason="case 7, postgresql://ann:secret@host/db")
    code, text = desk.run("hold", "--id", "1", "--reason", "case 8", "--operator", "ben")
    assert code == 0
    assert "1 letter held.\nLetter 1 was on hold by ann: case 7, postgresql" in text
    assert "secret" not in text, "a password is not stored"
    assert "The new reason counts now; the audit log keeps the earlier one." in text
    assert desk.letters.find(Filter(ids=(1,)))[0].hold == "case 8"
    assert "letter 1 is on hold by ben: case 8" in desk.run(*DISCARD, "--id", "1")[1]


@pytest.mark.parametrize("command", ["discard", "hold", "release"])
def test_without_a_filter_all_letters_stay_as_they_are(desk: Desk, command: str) -> None:
    code, text = desk.run(command, "--reason", "all", *(["--yes"] if command == "discard" else []))
    assert (code, f"give a filter to {command}" in text) == (2, True)
    assert desk.letters.count(Filter(status="open")) == 4

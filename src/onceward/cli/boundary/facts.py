"""`onceward boundary fetch|confirm|tail`: read facts from a boundary."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from onceward.cli.boundary.append import as_line
from onceward.cli.boundary.options import HERE, INTERRUPTED, Consumer, Url, connect
from onceward.cli.dlq.options import shorten
from onceward.cli.exit import AsJson, flag, option
from onceward.cli.output import WIDE, echo, iso_time, print_result, write_json

if TYPE_CHECKING:
    from onceward.boundary import Page, StoredFact

PAGE = 100
LONGEST_OBJECT, SHORTEST_OBJECT = 120, 20
"""Characters of an object that are shown."""
IDLE_SECONDS = 0.1


def fetch(
    consumer: Consumer,
    limit: Annotated[int, option("N", "Maximum number.", min=1)] = PAGE,
    confirming: Annotated[bool, flag("Confirm them after printing.", "--confirm")] = False,
    url: Url = HERE,
    as_json: AsJson = False,
) -> None:
    """Print the next facts of a consumer. It gets the same facts again until they are confirmed.

    `--json` prints one per line, after a line `{"gap": ...}` if unconfirmed facts have expired.

    Exit code: 0, even if there are none; 1 if the boundary refuses or cannot be reached; 2 for wrong arguments.
    """
    with connect(url, as_json) as (client, runner):
        page = runner.run(client.fetch(consumer, limit))
        _print_gap(page, consumer, as_json)
        if as_json:
            _print_lines(page)
        else:
            _print_facts(page, f"Nothing new for {consumer}.")
        if confirming and page.facts:
            _flush()
            runner.run(client.confirm(consumer, page.facts[-1].offset))


def confirm(
    consumer: Consumer,
    offset: Annotated[int, option("N", "Highest offset that is handled.")],
    url: Url = HERE,
    as_json: AsJson = False,
) -> None:
    """Confirm that all facts up to an offset are handled. A cursor never moves back; a lower offset does nothing.

    Exit code: 0; 1 if the boundary refuses or cannot be reached; 2 for wrong arguments.
    """
    with connect(url, as_json) as (client, runner):
        position = runner.run(client.confirm(consumer, offset))
    print_result({"cursor_advanced_to": position}, f"The cursor of {consumer} is at {position}.", as_json)


def tail(
    consumer: Consumer,
    once: Annotated[bool, flag("Stop at the end of the log.", "--once")] = False,
    url: Url = HERE,
    as_json: AsJson = False,
) -> None:
    """Print facts as they arrive, and confirm them after printing. Ctrl-C ends it.

    It moves the consumer's cursor: use a separate name, or the real consumer will miss what you have seen.

    Exit code: 0 with --once at the end; 1 if the boundary refuses or cannot be reached; 2 for wrong arguments; 130
    after Ctrl-C.
    """
    import time

    with connect(url, as_json) as (client, runner):
        try:
            while True:
                page = runner.run(client.fetch(consumer, PAGE))
                _print_gap(page, consumer, as_json)
                if as_json:
                    _print_lines(page)
                else:
                    for each in page.facts:
                        echo(f"{_prefix(each)}  {shorten(each.fact.object_json, LONGEST_OBJECT)}")
                if page.facts:
                    _flush()
                    runner.run(client.confirm(consumer, page.facts[-1].offset))
                elif once:
                    return
                else:
                    time.sleep(IDLE_SECONDS)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _print_facts(page: Page, empty: str) -> None:
    """Print two lines per fact, which fits a narrow terminal too."""
    width = shutil.get_terminal_size((WIDE, 0)).columns
    for each in page.facts:
        prefix = _prefix(each)
        room = min(max(width - len(prefix) - 2, SHORTEST_OBJECT), LONGEST_OBJECT)
        echo(f"{prefix}  {shorten(each.fact.object_json, room)}")
        zones = f"{each.envelope.from_zone} → {each.envelope.to_zone}"
        echo(f"{'':10}{zones}  {each.message_id}", dim=True)
    if not page.facts:
        echo(empty)


def _prefix(fact: StoredFact) -> str:
    at = iso_time(fact.appended_at_unix_ms / 1000)
    return f"{fact.offset:>8}  {at}  {fact.fact.subject} {fact.fact.predicate}"


def _print_lines(page: Page) -> None:
    for each in page.facts:
        write_json(as_line(each).decode())


def _print_gap(page: Page, consumer: str, as_json: bool) -> None:
    """Print a gap to stderr, and with `--json` also to stdout, where scripts read it."""
    if page.gap is None:
        return
    first, last = page.gap.first_missing, page.gap.last_missing
    echo(
        f"GAP: facts {first} to {last} expired before {consumer} confirmed them; it will not get them",
        color="yellow",
        err=True,
    )
    if as_json:
        write_json(msgspec.json.encode({"gap": page.gap}).decode())


def _flush() -> None:
    """Confirm only what has left this process; a broken pipe ends it here."""
    sys.stdout.flush()

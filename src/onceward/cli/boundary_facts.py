"""`onceward boundary fetch|confirm|tail`: facts out of a boundary."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onceward.cli.boundary_calling import HERE, INTERRUPTED, Consumer, Url, connected
from onceward.cli.boundary_lines import as_line
from onceward.cli.database import AsJson
from onceward.cli.letters import shortened
from onceward.cli.printing import iso_time, print_json, print_table

if TYPE_CHECKING:
    from onceward.boundary import Page, StoredFact

PAGE = 100
IDLE_SECONDS = 0.1


def fetch(
    consumer: Consumer,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many at most.")] = PAGE,
    confirming: Annotated[
        bool, typer.Option("--confirm", help="Confirm them once they are printed.")
    ] = False,
    url: Url = HERE,
    as_json: AsJson = False,
) -> None:
    """Print the next facts of a consumer. The same come again until they are confirmed.

    With `--json` a line each, and one `{"gap": ...}` before them if facts have expired that it had not confirmed.

    Exit code: 0, also if there are none; 1 if the boundary refuses or cannot be reached; 2 for wrong arguments.
    """
    with connected(url, as_json) as client:
        page = client.fetch(consumer, limit)
        _tell_gap(page, consumer, as_json)
        if as_json:
            _print_lines(page)
        else:
            columns = {
                "offset": "offset",
                "at": "appended",
                "subject": "subject",
                "predicate": "predicate",
                "object": "object",
                "zones": "zones",
                "message_id": "message",
            }
            print_table([_row(each) for each in page.facts], columns, f"There is nothing new for {consumer}.")
        if confirming and page.facts:
            _flush()
            client.confirm(consumer, page.facts[-1].offset)


def confirm(
    consumer: Consumer,
    offset: Annotated[int, typer.Option(metavar="N", help="The highest that is handled for good.")],
    url: Url = HERE,
    as_json: AsJson = False,
) -> None:
    """Say that all facts up to an offset are handled. A cursor never goes back: below it this does nothing.

    Exit code: 0; 1 if the boundary refuses or cannot be reached; 2 for wrong arguments.
    """
    with connected(url, as_json) as client:
        position = client.confirm(consumer, offset)
    if as_json:
        print_json({"cursor_advanced_to": position})
    else:
        typer.echo(f"The cursor of {consumer} is at {position}.")


def tail(
    consumer: Consumer,
    once: Annotated[bool, typer.Option("--once", help="Stop where the log ends.")] = False,
    url: Url = HERE,
    as_json: AsJson = False,
) -> None:
    """Print facts as they come, and confirm them once they are printed. Ctrl-C ends it.

    It moves the consumer's cursor: give it a name of its own, or the real consumer will miss what you have seen.

    Exit code: 0 with --once at the end; 1 if the boundary refuses or cannot be reached; 2 for wrong arguments; 130
    after Ctrl-C.
    """
    import time

    with connected(url, as_json) as client:
        try:
            while True:
                page = client.fetch(consumer, PAGE)
                _tell_gap(page, consumer, as_json)
                if as_json:
                    _print_lines(page)
                else:
                    for each in page.facts:
                        typer.echo("{offset:>8}  {at}  {subject} {predicate}  {object}".format(**_row(each)))
                if page.facts:
                    _flush()
                    client.confirm(consumer, page.facts[-1].offset)
                elif once:
                    return
                else:
                    time.sleep(IDLE_SECONDS)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _row(fact: StoredFact) -> dict[str, Any]:
    return {
        "offset": fact.offset,
        "at": iso_time(fact.appended_at_unix_ms / 1000),
        "subject": fact.fact.subject,
        "predicate": fact.fact.predicate,
        "object": shortened(fact.fact.object_json, 120),
        "zones": f"{fact.envelope.from_zone} → {fact.envelope.to_zone}",
        "message_id": fact.message_id,
    }


def _print_lines(page: Page) -> None:
    for each in page.facts:
        typer.echo(as_line(each))


def _tell_gap(page: Page, consumer: str, as_json: bool) -> None:
    """On stdout only for machines, which read nothing else."""
    if page.gap is None:
        return
    import msgspec

    first, last = page.gap.first_missing, page.gap.last_missing
    typer.secho(
        f"GAP: facts {first} to {last} had expired before {consumer} confirmed them; it will not get them",
        fg="yellow",
        err=True,
    )
    if as_json:
        typer.echo(msgspec.json.encode({"gap": page.gap}))


def _flush() -> None:
    """What is confirmed has left this process; a pipe that is broken ends it here."""
    sys.stdout.flush()

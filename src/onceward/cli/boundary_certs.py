"""`onceward boundary certs`: a CA and certificates to develop with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onceward.cli.boundary_calling import installed
from onceward.cli.database import MISUSED, AsJson, fail
from onceward.cli.printing import print_json


def certs(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to put them. Made if it is not there.")
    ],
    zone: Annotated[list[str], typer.Option("--zone", metavar="NAME", help="Repeat it for several zones.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME|IP",
            help="Where their servers are, besides localhost and 127.0.0.1; repeatable.",
        ),
    ] = None,
    days: Annotated[int, typer.Option(help="How long they are good.")] = 365,
    as_json: AsJson = False,
) -> None:
    """Make a CA, and a certificate for each zone, for its server and as a client. For development only.

    The identity of zone plant-a is plant-a-bsfg. Whoever has ca.key can be every zone: a real deployment has a CA of
    its own. Nothing is overwritten.

    Exit code: 0; 2 for wrong arguments, or if a file is there already or cannot be written.
    """
    from onceward.task.exceptions import ConfigurationError

    try:
        with installed(as_json):
            from onceward.boundary.certs import make_certificates

            made = make_certificates(directory, zone, host or (), days)
    except ConfigurationError as error:
        fail(str(error), as_json, MISUSED)
    rows = [
        {
            "identity": each.identity,
            "cert": str(each.tls.cert),
            "key": str(each.tls.key),
            "ca": str(each.tls.ca),
        }
        for each in made
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        typer.echo(f"{row['identity']}: {row['cert']}, {row['key']}")
    typer.echo(f"Signed by {rows[0]['ca']}. They are for development: do not put them to use.")

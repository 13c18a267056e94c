"""`onceward boundary certs`: a CA and certificates to develop with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onceward.cli.boundary.options import installed
from onceward.cli.exit import MISUSED, AsJson, fail
from onceward.cli.output import print_json


def certs(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to put them. Made if it is not there.")
    ],
    zone: Annotated[
        list[str] | None,
        typer.Option("--zone", metavar="NAME", help="For its server, and as a client; repeatable."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="NAME", help="An application: a client only; repeatable."),
    ] = None,
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
    """Make a CA, and certificates for zones and for applications that call them. For development only.

    Run it again on the same directory to add others: what is there stays as it is, and nothing is overwritten. The
    identity of zone plant-a is plant-a-bsfg, that of peer billing is billing. Whoever has ca.key can be everybody: a
    real deployment has a CA of its own.

    Exit code: 0; 2 for wrong arguments, or if a file cannot be written or is there for something else.
    """
    from onceward.errors import ConfigurationError

    try:
        with installed(as_json):
            from onceward.boundary.certs import make_certificates

            made = make_certificates(directory, zone or (), host or (), days, peer or ())
    except ConfigurationError as error:
        fail(str(error), as_json, MISUSED)
    rows = [
        {
            "identity": each.identity,
            "cert": str(each.tls.cert),
            "key": str(each.tls.key),
            "ca": str(each.tls.ca),
            "is_new": each.is_new,
        }
        for each in made
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        kept = "" if row["is_new"] else " (there already, kept as they are)"
        typer.echo(f"{row['identity']}: {row['cert']}, {row['key']}{kept}")
    typer.echo(f"Signed by {rows[0]['ca']}. They are for development: do not put them to use.")

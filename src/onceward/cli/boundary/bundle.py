"""`onceward boundary export|import`: facts and artifacts carried by hand, where no network leads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import msgspec
import typer

from onceward.cli.boundary.forward import Zone, receiving_side
from onceward.cli.boundary.options import HERE, INTERRUPTED, Url, checked, installed
from onceward.cli.boundary.transfers import progress_of
from onceward.cli.exit import MISUSED, AsJson, fail
from onceward.cli.output import print_json

if TYPE_CHECKING:
    from onceward.boundary.bundle import Contents, Header, Import

Progress = Callable[[int], object]


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The bundle to make.")],
    store: Annotated[
        str, typer.Option(metavar="STORE", help="A directory, postgresql://… or nats://…; it is only read.")
    ],
    zone: Annotated[str, typer.Option(metavar="NAME", help="The zone whose log it is.")],
    since: Annotated[
        int | None,
        typer.Option(min=0, metavar="OFFSET", help="Facts after this one; 0 is from the first on."),
    ] = None,
    consumer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Instead: after what this consumer has confirmed. It is not moved."
        ),
    ] = None,
    through: Annotated[
        int | None,
        typer.Option(min=1, metavar="OFFSET", show_default="the last", help="Up to and with this one."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write facts and their artifacts into one file, for `import` on the other side. Works beside a running server.

    The log itself is read, because a cursor could be read but once. When the other side has imported it, `onceward
    boundary confirm --consumer NAME --offset LAST` remembers that, and the next `export --consumer NAME` begins there.
    The name must be known: `serve --consumer NAME`.

    Exit code: 0, also if there is nothing new, which makes no file; 1 if an artifact is missing or something cannot be
    read or written; 2 for wrong arguments.
    """
    if (since is None) == (consumer is None):
        fail("say either --since OFFSET or --consumer NAME", as_json, MISUSED)
    if file.exists() and not force:
        fail(f"{file} exists already; name another file, or overwrite it with --force", as_json, MISUSED)
    with _explained(file, as_json), progress_of("exporting", None, as_json) as progress:
        done = asyncio.run(_export(store, zone, since, consumer, through, file, progress.advance))
    if done is None:
        if as_json:
            print_json({"facts": 0})
        else:
            typer.echo("There is nothing new; no file was made.")
        return
    header, contents = done
    if as_json:
        print_json(msgspec.to_builtins(header) | msgspec.to_builtins(contents) | {"file": str(file)})
        return
    typer.echo(
        f"{file} has {contents.facts:,} facts and {contents.objects:,} artifacts, from offset {header.since + 1:,} to "
        f"{header.last:,}."
    )
    if contents.missed:
        typer.secho(f"GAP: {contents.missed:,} facts had expired and are not in it", fg="yellow", err=True)


async def _export(
    store: str,
    zone: str,
    since: int | None,
    consumer: str | None,
    through: int | None,
    file: Path,
    progress: Progress,
) -> tuple[Header, Contents] | None:
    from onceward.boundary.bundle import BundleError, export
    from onceward.boundary.stores.read_only import open_reader

    async with open_reader(store) as look:
        if consumer is not None:
            since = await look.position(consumer, create=False)
        if since is None:
            raise BundleError(f"there is no consumer {consumer!r} in {store}; begin with --since 0")
        if since >= min((await look.bounds()).last, through or since + 1):
            return None
        return await export(look, zone, since, through, str(file), progress)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A bundle that `export` has made.")],
    zone: Zone,
    url: Url = HERE,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="STORE", help="Instead of a URL, and faster; a directory must not have a server."
        ),
    ] = None,
    skip: Annotated[
        list[int] | None,
        typer.Option(metavar="OFFSET", help="Leave this fact of the bundle out; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take the facts and artifacts of a bundle. Repeat it as often as you like: what is here already stays as it is.

    The whole file is checked first; a damaged one changes nothing. Facts of the receiving zone itself are passed over.
    A fact whose id is here with other content ends it there, with those before it taken; `--skip` goes on without it.

    Exit code: 0; 1 for a damaged file, a fact that cannot be taken, or a boundary that refuses or cannot be reached; 2
    for wrong arguments.
    """
    if not file.exists():
        fail(f"there is no file {file}; name the bundle that `export` has made", as_json, MISUSED)
    if not file.is_file():
        fail(f"{file} is no file that could be read twice; name the bundle", as_json, MISUSED)
    with installed(as_json):
        from onceward.boundary.bundle import Import, check

    async def run(bundle: BinaryIO, progress: Progress) -> Import:
        async with receiving_side(target, "--url") as side:
            taking = Import(side, zone, skip or ())
            try:
                await taking.run(bundle, progress)
            finally:
                so_far.append(_said(taking))
            return taking

    so_far: list[str] = []
    with _explained(file, as_json, so_far), file.open("rb") as bundle:
        target = store or checked(url)
        size = os.fstat(bundle.fileno()).st_size
        with progress_of("checking", size, as_json) as progress:
            header = check(bundle, progress.advance)
        with progress_of("importing", size, as_json) as progress:
            taking = asyncio.run(run(bundle, progress.advance))
    if as_json:
        print_json(msgspec.to_builtins(taking.done) | {"zone": header.zone, "last": header.last})
        return
    typer.echo(f"{_said(taking)}, up to offset {header.last:,} of {header.zone}.")
    if taking.done.missed:
        typer.secho(
            f"GAP: {taking.done.missed:,} facts had expired before the bundle was made; they will not come",
            fg="yellow",
            err=True,
        )


def _said(taking: Import) -> str:
    done = taking.done
    said = [f"{done.appended:,} appended", f"{done.duplicates:,} there already"]
    said += [f"{done.own:,} of this zone itself"] if done.own else []
    said += [f"{done.skipped:,} skipped"] if done.skipped else []
    return ", ".join(said)


@contextmanager
def _explained(file: Path, as_json: bool, so_far: list[str] | None = None) -> Iterator[None]:
    from onceward.errors import ConfigurationError, OncewardError

    try:
        with installed(as_json):
            yield
    except ConfigurationError as error:
        fail(str(error), as_json, MISUSED)
    except OncewardError as error:
        fail("; ".join([str(error), *(so_far or ())]), as_json)
    except OSError as error:
        fail(f"{file}: {error.strerror or error}", as_json)
    except KeyboardInterrupt:
        fail("interrupted; it is safe to repeat", as_json, INTERRUPTED)

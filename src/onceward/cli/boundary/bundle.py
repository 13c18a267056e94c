"""`onceward boundary export|import`: carry facts and artifacts by hand where there is no network."""

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
from onceward.cli.boundary.options import HERE, INTERRUPTED, Url, check_url, require_extra
from onceward.cli.boundary.transfers import progress_of
from onceward.cli.exit import MISUSED, AsJson, fail
from onceward.cli.output import print_json

if TYPE_CHECKING:
    from onceward.boundary.bundle import Contents, Header, Import

Progress = Callable[[int], object]


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The bundle to write.")],
    store: Annotated[
        str, typer.Option(metavar="STORE", help="A directory, postgresql://… or nats://…; only read.")
    ],
    zone: Annotated[str, typer.Option(metavar="NAME", help="The zone that owns the log.")],
    since: Annotated[
        int | None,
        typer.Option(min=0, metavar="OFFSET", help="Start after this fact; 0 starts at the first."),
    ] = None,
    consumer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Start after what this consumer has confirmed, instead of --since. Its cursor does not move.",
        ),
    ] = None,
    through: Annotated[
        int | None,
        typer.Option(min=1, metavar="OFFSET", show_default="the last", help="Up to and including this fact."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write facts and their artifacts into one file, for `import` on the other side. Works beside a running server.

    It reads the log itself, so an export can be repeated. When the other side has imported it, run `onceward boundary
    confirm --consumer NAME --offset LAST`, and the next `export --consumer NAME` starts there. The name must be known:
    `serve --consumer NAME`.

    Exit code: 0, even if there is nothing new, which writes no file; 1 if an artifact is missing or something cannot be
    read or written; 2 for wrong arguments.
    """
    if (since is None) == (consumer is None):
        fail("pass either --since OFFSET or --consumer NAME", as_json, MISUSED)
    if file.exists() and not force:
        fail(f"{file} already exists; name another file, or overwrite it with --force", as_json, MISUSED)
    with _handle_errors(file, as_json), progress_of("exporting", None, as_json) as progress:
        done = asyncio.run(_export(store, zone, since, consumer, through, file, progress.advance))
    if done is None:
        if as_json:
            print_json({"facts": 0})
        else:
            typer.echo("Nothing new; no file was written.")
        return
    header, contents = done
    if as_json:
        print_json(msgspec.to_builtins(header) | msgspec.to_builtins(contents) | {"file": str(file)})
        return
    typer.echo(
        f"Wrote {contents.facts:,} facts and {contents.objects:,} artifacts to {file}, offsets {header.since + 1:,} to "
        f"{header.last:,}."
    )
    if contents.missed:
        typer.secho(
            f"GAP: {contents.missed:,} facts had expired and are not in the bundle", fg="yellow", err=True
        )


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
            raise BundleError(f"{store} has no consumer {consumer!r}; start with --since 0")
        if since >= min((await look.bounds()).last, through or since + 1):
            return None
        return await export(look, zone, since, through, str(file), progress)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A bundle written by `export`.")],
    zone: Zone,
    url: Url = HERE,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="STORE",
            help="Store to use instead of a URL, which is faster; a directory must not have a running server.",
        ),
    ] = None,
    skip: Annotated[
        list[int] | None,
        typer.Option(metavar="OFFSET", help="Skip this fact of the bundle; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import the facts and artifacts of a bundle. Safe to repeat: what is already here stays unchanged.

    It checks the whole file first; a damaged one changes nothing. Facts of the receiving zone itself are skipped. It
    stops at a fact whose id is here with other content, keeping those before it; `--skip` continues without that fact.

    Exit code: 0; 1 for a damaged file, a fact that cannot be imported, or a boundary that refuses or cannot be reached;
    2 for wrong arguments.
    """
    if not file.exists():
        fail(f"{file} does not exist; name a bundle written by `export`", as_json, MISUSED)
    if not file.is_file():
        fail(f"{file} is not a regular file, which must be read twice; name the bundle", as_json, MISUSED)
    with require_extra(as_json):
        from onceward.boundary.bundle import Import, check

    async def run(bundle: BinaryIO, progress: Progress) -> Import:
        async with receiving_side(target, "--url") as side:
            taking = Import(side, zone, skip or ())
            try:
                await taking.run(bundle, progress)
            finally:
                so_far.append(_summary(taking))
            return taking

    so_far: list[str] = []
    with _handle_errors(file, as_json, so_far), file.open("rb") as bundle:
        target = store or check_url(url)
        size = os.fstat(bundle.fileno()).st_size
        with progress_of("checking", size, as_json) as progress:
            header = check(bundle, progress.advance)
        with progress_of("importing", size, as_json) as progress:
            taking = asyncio.run(run(bundle, progress.advance))
    if as_json:
        print_json(msgspec.to_builtins(taking.done) | {"zone": header.zone, "last": header.last})
        return
    typer.echo(f"{_summary(taking)}, up to offset {header.last:,} of {header.zone}.")
    if taking.done.missed:
        typer.secho(
            f"GAP: {taking.done.missed:,} facts had expired before the bundle was written; they will not arrive",
            fg="yellow",
            err=True,
        )


def _summary(taking: Import) -> str:
    done = taking.done
    counts = [f"{done.appended:,} appended", f"{done.duplicates:,} already there"]
    counts += [f"{done.own:,} of this zone itself"] if done.own else []
    counts += [f"{done.skipped:,} skipped"] if done.skipped else []
    return ", ".join(counts)


@contextmanager
def _handle_errors(file: Path, as_json: bool, so_far: list[str] | None = None) -> Iterator[None]:
    from onceward.errors import ConfigurationError, OncewardError

    try:
        with require_extra(as_json):
            yield
    except ConfigurationError as error:
        fail(str(error), as_json, MISUSED)
    except OncewardError as error:
        fail("; ".join([str(error), *(so_far or ())]), as_json)
    except OSError as error:
        fail(f"{file}: {error.strerror or error}", as_json)
    except KeyboardInterrupt:
        fail("interrupted; it is safe to repeat", as_json, INTERRUPTED)

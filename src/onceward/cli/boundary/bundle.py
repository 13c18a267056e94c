"""`onceward boundary export|import`: carry facts and artifacts by hand where there is no network."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import msgspec

from onceward._secrets import mask_url
from onceward.cli.boundary.forward import Zone, receiving_side
from onceward.cli.boundary.options import HERE, Url, check_url, handle_errors, require_extra
from onceward.cli.boundary.transfers import progress_of
from onceward.cli.exit import (
    MISUSED,
    AsJson,
    argument,
    fail,
    flag,
    is_taken,
    option,
    reason_of,
    refuse_mistakes,
    refuse_path,
)
from onceward.cli.output import echo, print_json, print_result
from onceward.errors import OncewardError

if TYPE_CHECKING:
    from onceward.boundary.bundle import Contents, Header, Import

Progress = Callable[[int], object]


def export(
    file: Annotated[Path, argument("FILE", "The bundle to write.")],
    store: Annotated[str, option("STORE", "A directory, postgresql://… or nats://…; only read.")],
    zone: Annotated[str, option("NAME", "The zone that owns the log.")],
    since: Annotated[
        int | None, option("OFFSET", "Start after this fact; 0 starts at the first.", min=0)
    ] = None,
    consumer: Annotated[
        str | None,
        option(
            "NAME",
            "Start after what this consumer has confirmed, instead of --since. Its cursor does not move.",
        ),
    ] = None,
    through: Annotated[
        int | None, option("OFFSET", "Up to and including this fact.", min=1, show_default="the last")
    ] = None,
    force: Annotated[bool, flag("Overwrite an existing file.", "--force")] = False,
    as_json: AsJson = False,
) -> None:
    """Write facts and their artifacts into one file, for `import` on the other side. Works while a server is running.

    It reads the log itself, so an export can be repeated. When the other side has imported it, run `onceward boundary
    confirm --consumer NAME --offset LAST`, and the next `export --consumer NAME` starts there. Register the name
    first: `serve --consumer NAME`.

    Exit code: 0, even if there is nothing new, which writes no file; 1 if an artifact is missing or something cannot be
    read or written; 2 for wrong arguments.
    """
    if (since is None) == (consumer is None):
        fail("pass either --since OFFSET or --consumer NAME", as_json, MISUSED)
    with refuse_path(file, as_json, doing="written"):
        if is_taken(file) and not force:
            fail(f"{file} already exists; name another file, or overwrite it with --force", as_json, MISUSED)

    async def run(progress: Progress) -> tuple[Header, Contents] | None:
        from onceward.boundary import bundle
        from onceward.boundary.stores.read_only import open_reader

        async with open_reader(store) as look:
            start = since if consumer is None else await look.position(consumer, create=False)
            if start is None:
                raise bundle.BundleError(
                    f"{mask_url(store)} has no consumer {consumer!r}; start with --since 0"
                )
            if start >= min((await look.bounds()).last, through or start + 1):
                return None
            return await bundle.export(look, zone, start, through, str(file), progress)

    with _handle_errors(file, as_json), progress_of("exporting", None, as_json) as progress:
        done = asyncio.run(run(progress.advance))
    if done is None:
        print_result({"facts": 0}, "Nothing new; no file was written.", as_json)
        return
    header, contents = done
    if as_json:
        print_json(msgspec.to_builtins(header) | msgspec.to_builtins(contents) | {"file": str(file)})
        return
    echo(
        f"Wrote {contents.facts:,} facts and {contents.objects:,} artifacts to {file}, offsets {header.since + 1:,} to "
        f"{header.last:,}."
    )
    if contents.missed:
        echo(
            f"GAP: {contents.missed:,} facts had expired and are not in the bundle", color="yellow", err=True
        )


def import_(
    file: Annotated[Path, argument("FILE", "A bundle written by `export`.")],
    zone: Zone,
    url: Url = HERE,
    store: Annotated[
        str | None,
        option(
            "STORE",
            "Store to use instead of a URL, which is faster; a directory must not have a running server.",
        ),
    ] = None,
    skip: Annotated[list[int] | None, option("OFFSET", "Skip this fact of the bundle; repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """Import the facts and artifacts of a bundle. Safe to repeat: what is already here stays unchanged.

    It checks the whole file first; a damaged one changes nothing. Facts of the receiving zone itself are skipped. It
    stops at a fact whose id is here with other content, keeping those before it; `--skip` continues without that fact.

    Exit code: 0; 1 for a damaged file, a fact that cannot be imported, or a boundary that refuses or cannot be reached;
    2 for wrong arguments.
    """
    with refuse_path(file, as_json):
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
    echo(f"{_summary(taking)}, up to offset {header.last:,} of {header.zone}.")
    if taking.done.missed:
        echo(
            f"GAP: {taking.done.missed:,} facts had expired before the bundle was written; they will not arrive",
            color="yellow",
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
    with handle_errors(as_json):
        try:
            with refuse_mistakes(as_json):
                yield
        except OncewardError as error:
            fail("; ".join([str(error), *(so_far or ())]), as_json)
        except (OSError, ValueError) as error:
            fail(f"{file}: {reason_of(error)}", as_json)

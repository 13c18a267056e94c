"""`onceward boundary put|get`: objects of any size, in pieces, with a progress bar on a terminal."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import os
from collections.abc import AsyncIterator
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Annotated

import typer

from onceward._files.private import NewFile
from onceward.cli.boundary.options import HERE, Url, client_for, handle_errors
from onceward.cli.boundary.transfers import pieces_of, progress_of, size_of
from onceward.cli.exit import FAILED, MISUSED, AsJson, argument, fail, flag, option, refuse_path
from onceward.cli.output import print_result

if TYPE_CHECKING:
    from onceward.boundary import ObjectRef

Bucket = Annotated[str, argument("BUCKET", "Bucket, such as batch-files.")]
Key = Annotated[str, argument("KEY", "Name in the bucket.")]


def put(
    bucket: Bucket,
    key: Key,
    file: Annotated[str, argument("FILE|-", "File to store; - reads standard input.")],
    media_type: Annotated[
        str | None,
        option("TYPE", "Media type, such as application/pdf.", show_default="guessed from the name"),
    ] = None,
    url: Url = HERE,
    as_json: AsJson = False,
) -> None:
    """Store a file as an object that a fact can refer to. Put the object first, then append the fact.

    Objects never change: repeating the same bytes is fine, others need another key. `--json` prints the reference to
    use as the fact's object.

    Exit code: 0; 1 if the boundary refuses or cannot be reached; 2 for wrong arguments or a file that cannot be read.
    """
    given = media_type or mimetypes.guess_type(file)[0] or "application/octet-stream"
    with refuse_path(file, as_json):
        source = open(0 if file == "-" else file, "rb", buffering=0, closefd=file != "-")  # noqa: SIM115
    with source, handle_errors(as_json):
        ref = asyncio.run(_send(source, bucket, key, given, url, as_json))
    print_result(ref, f"Stored {bucket}/{key}: {ref.size:,} bytes of {given}, {ref.digest}", as_json)


async def _send(
    source: IO[bytes], bucket: str, key: str, media_type: str, url: str, as_json: bool
) -> ObjectRef:
    async with client_for(url) as client:
        with progress_of(f"{bucket}/{key}", size_of(source), as_json) as progress:

            async def pieces() -> AsyncIterator[bytes]:
                async for piece in pieces_of(source):
                    yield piece
                    progress.advance(len(piece))

            return await client.put_stream(bucket, key, pieces(), media_type)


def get(
    bucket: Bucket,
    key: Key,
    file: Annotated[
        str | None,
        argument("FILE|-", "File to write; - is standard output.", show_default="the key's last part, here"),
    ] = None,
    force: Annotated[bool, flag("Overwrite an existing file.", "--force")] = False,
    url: Url = HERE,
    as_json: AsJson = False,
) -> None:
    """Fetch an object and verify its digest. The file gets its name only when it is complete and verified, and
    only you may read it.

    Exit code: 0; 1 if there is no such object, its digest is wrong, the file cannot be written or the
    boundary cannot be reached; 2 for wrong arguments or a file that exists.
    """
    if file == "-":
        with handle_errors(as_json):
            asyncio.run(_receive(typer.get_binary_stream("stdout"), bucket, key, url, as_json))
        return
    place = Path(file or PurePosixPath(key).name)
    with refuse_path(place, as_json, doing="written", code=FAILED):
        _check_place(place, force, as_json)
        with NewFile(place, replace=force) as target, handle_errors(as_json):
            ref = asyncio.run(_receive(target, bucket, key, url, as_json))
    print_result(ref, f"Wrote {place}: {ref.size:,} bytes, verified: {ref.digest}", as_json)


def _check_place(place: Path, force: bool, as_json: bool) -> None:
    if place.name in ("", "..") or place.is_dir():
        fail(f"{place} is a directory; name a file", as_json, MISUSED)
    if place.exists() and not place.is_file():
        fail(f"{place} is not a regular file; use - and redirect", as_json, MISUSED)
    if os.path.lexists(place) and not force:
        fail(f"{place} already exists; name another file, or overwrite it with --force", as_json, MISUSED)


async def _receive(target: IO[bytes], bucket: str, key: str, url: str, as_json: bool) -> ObjectRef:
    from onceward.boundary.artifacts import IntegrityError

    digest = hashlib.sha256()
    async with client_for(url) as client:
        with progress_of(f"{bucket}/{key}", None, as_json) as progress:

            def write(piece: bytes) -> None:
                digest.update(piece)
                target.write(piece)
                progress.advance(len(piece))

            ref = await client.get_stream(bucket, key, write, lambda ref: progress.whole(ref.size))
    target.flush()
    if ref.digest != f"sha256:{digest.hexdigest()}":
        raise IntegrityError(
            f"object {bucket}/{key} arrived damaged: it does not have the digest {ref.digest}; do not use it"
        )
    return ref

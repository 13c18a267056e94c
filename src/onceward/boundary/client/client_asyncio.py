"""A client of a boundary, for asyncio.

The client makes every call once: nothing is retried behind your back, except where the name or the docstring says so.
An error that is worth another try has `retryable`, and an append is safe to repeat with the same id and content.
"""

# make faces writes client.py, with
#   run_blocking: self._calls, artifacts

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Mapping
from typing import Any, BinaryIO, Self

from onceward.boundary import artifacts
from onceward.boundary.client.calls import Calls
from onceward.boundary.client.transport import AsyncBoundaryPort, CallTimes, check_url
from onceward.boundary.errors import BoundaryError
from onceward.boundary.model import Appended, Envelope, Fact, ObjectRef, Page, StoredFact
from onceward.boundary.tls import Tls

Path = str | os.PathLike[str]
TRANSFER_TIMEOUT = 3600.0
"""Seconds for an object sent in pieces, however large it is."""


class AsyncBoundaryClient:
    """A boundary at a URL, for asyncio. Tasks may share one.

    `timeout` is for one call, `transfer_timeout` for one object in pieces, in seconds; None waits forever. `tls` is for
    https://: the CA to trust and the certificate to show. `sleep` waits between retries, where there are any.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float | None = 30.0,
        transfer_timeout: float | None = TRANSFER_TIMEOUT,
        tls: Tls | None = None,
        sleep: Callable[[float], Awaitable[object]] | None = None,
    ) -> None:
        address = check_url(url, tls)
        self._port = AsyncBoundaryPort(address, CallTimes(timeout, transfer_timeout), sleep, tls)
        self._calls = Calls(address, self._port)

    async def append(self, envelope: Envelope, fact: Fact) -> Appended:
        """Make a fact durable. Repeat it with the same id and content until it succeeds. Concurrent callers share
        calls to the server."""
        return await self._calls.append(envelope, fact)

    async def append_all(
        self, messages: Iterable[tuple[Envelope, Fact]], *, in_order: bool = False
    ) -> list[Appended | BoundaryError]:
        """Make facts durable, in this order and in few calls. Return an outcome for each: its offset, or the error
        that `append` would raise. A refused fact does not affect the others; with `in_order`, none is appended behind
        it, unless it is a conflict. Facts that were not tried, for example after a failed call, are `Aborted`."""
        return await self._calls.append_all(messages, in_order)

    async def append_until_durable(self, envelope: Envelope, fact: Fact) -> Appended:
        """`append`, repeated with the same id and content while the error is `retryable`: ten calls at most, with
        waits of 100 ms, 200 ms and so on. Then the last error is raised; the fact may or may not be in the log."""
        return await self._calls.append_until_durable(envelope, fact)

    async def append_with_artifact(
        self,
        envelope: Envelope,
        subject: str,
        predicate: str,
        artifact: bytes | Path,
        *,
        bucket: str,
        key: str,
        media_type: str,
        more: Mapping[str, Any] | None = None,
    ) -> Appended:
        """Put the artifact, bytes or a file's path, and then append the fact that refers to it.

        The fact's object is the reference, with the entries of `more` added. Two calls, not one transaction: if the
        second fails, no fact refers to the object yet, and repeating both is safe.
        """
        into = artifacts.ArtifactPlace(bucket, key, media_type)
        return await artifacts.append_with(
            self._calls, envelope, subject, predicate, artifact, into, more or {}
        )

    async def fetch(
        self,
        consumer_name: str,
        limit: int = 100,
        max_bytes: int = 0,
        *,
        wait: float = 0.0,
        wait_after: int = 0,
        confirm: int = 0,
    ) -> Page:
        """Return the next facts of this consumer; the same ones until they are confirmed. A page has up to 4 MiB, or
        `max_bytes`, of which at most 32 MiB count, or one larger fact.

        With `wait`, the answer comes when there is a fact beyond the cursor and the offset `wait_after`, or after that
        many seconds, 20 at most. An older boundary answers at once.

        `confirm` first does what `confirm` with this offset does, or raises what that raises, in the same call: a page
        that is handled is confirmed together with the fetch of the next. 0 confirms nothing.
        """
        return await self._calls.fetch(consumer_name, limit, max_bytes, wait, wait_after, confirm)

    async def confirm(self, consumer_name: str, offset: int) -> int:
        """Confirm that everything up to this offset is handled durably. Return the cursor's position."""
        return await self._calls.confirm(consumer_name, offset)

    async def remove_consumer(self, consumer_name: str) -> int:
        """Forget a consumer. Return where its cursor was. If it fetches again, it starts at the earliest fact."""
        return await self._calls.remove_consumer(consumer_name)

    async def put(self, bucket: str, key: str, blob: bytes, media_type: str = "") -> ObjectRef:
        """Store an object that fits into memory."""
        return await self._calls.put(bucket, key, blob, media_type)

    async def put_stream(
        self, bucket: str, key: str, data: AsyncIterable[bytes] | Iterable[bytes], media_type: str = ""
    ) -> ObjectRef:
        """Store an object of any size. If `data` raises, that is raised, and nothing is stored."""
        return await self._calls.put_stream(bucket, key, data, media_type)

    async def put_file(self, bucket: str, key: str, path: Path, media_type: str = "") -> ObjectRef:
        """Store a file of any size."""
        return await self._calls.put_file(bucket, key, path, media_type)

    async def get(self, bucket: str, key: str) -> tuple[bytes, ObjectRef]:
        """Return an object that fits into memory, not verified: `fetch_artifact` does that."""
        return await self._calls.get(bucket, key)

    async def get_stream(
        self,
        bucket: str,
        key: str,
        write: Callable[[bytes], object],
        begin: Callable[[ObjectRef], object] = lambda ref: None,
    ) -> ObjectRef:
        """Pass an object of any size to `write`, piece by piece, not verified: `fetch_artifact_to` does that. `begin`
        gets its reference, which has its size, before the first piece."""
        return await self._calls.get_stream(bucket, key, write, begin)

    def get_pieces(self, bucket: str, key: str) -> AsyncGenerator[bytes]:
        """`get_stream` as an iterator, for example to feed `put_stream` of another boundary."""
        return self._port.stream(self._calls.pieces(bucket, key))

    async def fetch_artifact(self, fact: StoredFact | Fact, verify: bool = True) -> bytes:
        """Return the artifact that a fact refers to, if it fits into memory. Its size and SHA-256 are verified.

        *Not found* and `retryable` errors are retried: ten calls, with waits of 100 ms, 200 ms and so on, 51.1 s in
        total. Then raises `ArtifactMissingError`. Raises `IntegrityError` for other bytes than those the fact refers
        to, and `BadReferenceError` for a fact that refers to nothing.
        """
        return await artifacts.fetch(self._calls, fact, verify)

    async def fetch_artifact_to(
        self, fact: StoredFact | Fact, target: Path | BinaryIO, verify: bool = True
    ) -> ObjectRef:
        """`fetch_artifact` for any size, into a file.

        A path is replaced only when the artifact is complete, verified and on disk; until then it is written next to
        it. An open file is written from its current position, and truncated back to it on failure: it must be seekable.
        """
        return await artifacts.fetch_to(self._calls, fact, target, verify)

    async def close(self) -> None:
        """Close the connections."""
        await self._calls.port.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

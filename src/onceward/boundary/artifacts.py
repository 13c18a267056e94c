"""Artifacts of facts: found by the reference in a fact, fetched, verified; and put before the fact that names them.

A reference is a JSON object with bucket, key, digest, size and media_type. An artifact may arrive later than the fact
that names it, so that *not found* is tried again for a while before it is an error.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from onceward.boundary.errors import NotFound, Unavailable
from onceward.boundary.model import Fact, ObjectRef, StoredFact
from onceward.task.exceptions import OncewardError

_log = logging.getLogger("onceward.boundary")

CALLS = 10
FIRST_WAIT = 0.1
"""Seconds; doubled after every call that failed."""


class ArtifactError(OncewardError):
    """An artifact cannot be used. The fact that names it cannot be processed, and must not be confirmed."""


class IntegrityError(ArtifactError):
    """What came is not what the fact speaks of."""


class ArtifactMissingError(ArtifactError):
    """It is not there, and has not come in time."""


class BadReferenceError(ArtifactError):
    """The fact's object is no reference to an artifact."""


def reference_of(fact: StoredFact | Fact) -> ObjectRef:
    """What the fact's object refers to."""
    value = (fact.fact if isinstance(fact, StoredFact) else fact).object
    try:
        ref = msgspec.convert(value, ObjectRef)
    except msgspec.ValidationError as error:
        raise BadReferenceError(
            f"the fact's object is no reference to an artifact ({error}); it needs bucket, key, digest, size and "
            "media_type"
        ) from None
    algorithm, _, _hex = ref.digest.partition(":")
    if algorithm.lower() != "sha256" or len(_hex) != 64:
        raise BadReferenceError(f"digest must be sha256:<64 hexadecimal digits>, not {ref.digest!r:.80}")
    return ref


class Check:
    """Takes pieces as they come, and says in the end whether they are the artifact."""

    def __init__(self, ref: ObjectRef) -> None:
        self._ref = ref
        self._digest = hashlib.sha256()
        self._size = 0

    def add(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._size += len(piece)

    def conclude(self) -> None:
        name = f"{self._ref.bucket}/{self._ref.key}"
        if self._size != self._ref.size:
            raise IntegrityError(f"object {name} has {self._size} bytes where the fact says {self._ref.size}")
        if self._digest.hexdigest() != self._ref.digest.partition(":")[2].lower():
            raise IntegrityError(
                f"object {name} does not have the digest that the fact names, {self._ref.digest}"
            )


async def fetched(
    get: Callable[..., Any], sleep: Callable[[float], Any], ref: ObjectRef, verify: bool, calls: int
) -> bytes:
    """The artifact, verified. `get` and `sleep` block or are awaited, as their mode has it."""
    wait = FIRST_WAIT
    for call in range(1, calls + 1):
        try:
            parts: list[bytes] = []
            await get(ref.bucket, ref.key, parts.append)
            break
        except (NotFound, Unavailable) as error:
            if call == calls:
                raise ArtifactMissingError(
                    f"object {ref.bucket}/{ref.key} could not be fetched, {calls} times: {error}"
                ) from error
            _log.info(
                "object %s/%s is not here yet (%s); next try in %.1f s", ref.bucket, ref.key, error, wait
            )
            await sleep(wait)
            wait *= 2
    blob = b"".join(parts)
    if verify:
        check = Check(ref)
        check.add(blob)
        check.conclude()
    return blob


def as_reference(ref: ObjectRef, file_name: str | None = None) -> dict[str, Any]:
    """What a fact's object says of an artifact."""
    value = msgspec.to_builtins(ref)
    return {**value, "file_name": file_name} if file_name else dict(value)

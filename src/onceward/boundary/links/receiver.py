"""The receiving side of a zone: takes facts from a link or from a bundle.

In process that is a `Boundary`, which appends many facts in few commits. Over RPC it is a client, which sends many in
one call, and one call after another: concurrent ones may overtake each other, and lose the order of the source.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from onceward.boundary.artifacts import BadReferenceError, Check, reference_of
from onceward.boundary.boundary import Boundary
from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
from onceward.boundary.errors import BoundaryError, InvalidArgument, ObjectConflict
from onceward.boundary.model import Appended, Fact, ObjectRef, StoredFact, check_object_name


class Receiver(Protocol):
    async def append_all(self, facts: Sequence[StoredFact]) -> Sequence[Appended | BoundaryError]:
        """Append in this order, at least up to the first conflict, and none behind one that is refused otherwise."""
        ...

    async def lacks(self, ref: ObjectRef) -> bool:
        """Return whether the object is missing, or may be. Raise `ObjectConflict` if it exists with other bytes."""
        ...

    async def keep(self, ref: ObjectRef, pieces: AsyncIterator[bytes]) -> None:
        """Store an object. Raise `IntegrityError`, and store nothing, if the pieces are not what `ref` says."""
        ...


def receiver_of(side: Boundary | AsyncBoundaryClient) -> Receiver:
    return InProcess(side) if isinstance(side, Boundary) else OverRpc(side)


class InProcess:
    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary

    async def append_all(self, facts: Sequence[StoredFact]) -> Sequence[Appended | BoundaryError]:
        return await self._boundary.append_all([(each.envelope, each.fact) for each in facts])

    async def lacks(self, ref: ObjectRef) -> bool:
        check_object_name(ref.bucket, ref.key)  # a bundle may name anything, and stores make paths of it
        known = await self._boundary.store.objects.head(ref.bucket, ref.key)
        if known is not None and known.digest != ref.digest:
            raise ObjectConflict(ref.bucket, ref.key)
        return known is None

    async def keep(self, ref: ObjectRef, pieces: AsyncIterator[bytes]) -> None:
        await self._boundary.put(ref.bucket, ref.key, verify_pieces(ref, pieces), ref.media_type)


class OverRpc:
    """A boundary cannot be asked whether it has an object, so the bytes are always sent; repeating them is allowed."""

    def __init__(self, client: AsyncBoundaryClient) -> None:
        self._client = client

    async def append_all(self, facts: Sequence[StoredFact]) -> Sequence[Appended | BoundaryError]:
        return await self._client.append_all([(each.envelope, each.fact) for each in facts], in_order=True)

    async def lacks(self, ref: ObjectRef) -> bool:
        return True

    async def keep(self, ref: ObjectRef, pieces: AsyncIterator[bytes]) -> None:
        await self._client.put_stream(ref.bucket, ref.key, verify_pieces(ref, pieces), ref.media_type)


class Refused(NamedTuple):
    """A fact that this side does not accept, and why. Retrying does not help."""

    fact: StoredFact
    why: str


async def append_until_refused(
    receiver: Receiver, facts: Sequence[StoredFact]
) -> tuple[list[Appended], Refused | None]:
    """Append in order. Return those that are here now, and the first that was refused. Raise `retryable` errors."""
    appended: list[Appended] = []
    try:
        outcomes = await receiver.append_all(facts) if facts else []
    except BoundaryError as error:
        if error.retryable:
            raise
        if len(facts) == 1:
            return [], Refused(facts[0], str(error))
        for fact in facts:  # one of them is refused: append those before it
            one, refused = await append_until_refused(receiver, [fact])
            if refused is not None:
                return appended, refused
            appended += one
        return appended, None
    for fact, outcome in zip(facts, outcomes, strict=False):
        if isinstance(outcome, BoundaryError):
            if outcome.retryable:
                raise outcome
            return appended, Refused(fact, str(outcome))
        appended.append(outcome)
    return appended, None


async def verify_pieces(ref: ObjectRef, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces. Raise `IntegrityError` at the end if they are not the object."""
    check = Check(ref)
    async for piece in pieces:
        check.add(piece)
        yield piece
    check.conclude()


def artifact_of(fact: Fact) -> ObjectRef | None:
    """Return the artifact that must be here before the fact; None if it refers to nothing a boundary could store."""
    text = fact.object_json
    if "\\" not in text and ('"digest"' not in text or '"bucket"' not in text):
        return None  # as for most facts: skip decoding
    try:
        ref = reference_of(fact)
        check_object_name(ref.bucket, ref.key)
    except (BadReferenceError, InvalidArgument):
        return None
    return ref

"""The side of a zone that takes facts from elsewhere: over a link, or out of a bundle.

In process that is a `Boundary`, which appends many facts in few commits. Over RPC it is a client, which appends one
fact after another: of two calls at once either may be the first, and the order of the source would be lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from onceward.boundary.artifacts import BadReferenceError, Check, reference_of
from onceward.boundary.boundary import Boundary
from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
from onceward.boundary.errors import BoundaryError, ConflictingDuplicate, InvalidArgument, ObjectConflict
from onceward.boundary.model import Appended, Fact, ObjectRef, StoredFact, check_object_name

Outcome = Appended | ConflictingDuplicate


class Receiver(Protocol):
    async def append_all(self, facts: Sequence[StoredFact]) -> list[Outcome]:
        """In this order, up to the first conflict at least."""
        ...

    async def lacks(self, ref: ObjectRef) -> bool:
        """Raises `ObjectConflict` if other bytes are there. What cannot be told counts as lacking."""
        ...

    async def keep(self, ref: ObjectRef, pieces: AsyncIterator[bytes]) -> None:
        """Nothing is kept if the pieces are not what `ref` says, which raises `IntegrityError`."""
        ...


def receiver_of(side: Boundary | AsyncBoundaryClient) -> Receiver:
    return InProcess(side) if isinstance(side, Boundary) else OverRpc(side)


class InProcess:
    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary

    async def append_all(self, facts: Sequence[StoredFact]) -> list[Outcome]:
        return await self._boundary.append_all([(each.envelope, each.fact) for each in facts])

    async def lacks(self, ref: ObjectRef) -> bool:
        known = await self._boundary.store.objects.head(ref.bucket, ref.key)
        if known is not None and known.digest != ref.digest:
            raise ObjectConflict(ref.bucket, ref.key)
        return known is None

    async def keep(self, ref: ObjectRef, pieces: AsyncIterator[bytes]) -> None:
        await self._boundary.put(ref.bucket, ref.key, verified(ref, pieces), ref.media_type)


class OverRpc:
    """A boundary can be asked for an object's bytes, but not whether it has them: they are sent, which it allows."""

    def __init__(self, client: AsyncBoundaryClient) -> None:
        self._client = client

    async def append_all(self, facts: Sequence[StoredFact]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for each in facts:
            try:
                outcomes.append(await self._client.append(each.envelope, each.fact))
            except ConflictingDuplicate as conflict:
                return [*outcomes, conflict]
        return outcomes

    async def lacks(self, ref: ObjectRef) -> bool:
        return True

    async def keep(self, ref: ObjectRef, pieces: AsyncIterator[bytes]) -> None:
        await self._client.put_stream(ref.bucket, ref.key, verified(ref, pieces), ref.media_type)


class Refused(NamedTuple):
    """A fact that this side does not take for what it is, and why. Trying again does not help."""

    fact: StoredFact
    why: str


async def append_until_refused(
    receiver: Receiver, facts: Sequence[StoredFact]
) -> tuple[list[Appended], Refused | None]:
    """Those that are here now, in their order, and why the next one is not. Raises what is `retryable`."""
    appended: list[Appended] = []
    try:
        outcomes = await receiver.append_all(facts) if facts else []
    except BoundaryError as error:
        if error.retryable:
            raise
        if len(facts) == 1:
            return [], Refused(facts[0], str(error))
        for fact in facts:  # one of them is refused; those before it are not
            one, refused = await append_until_refused(receiver, [fact])
            if refused is not None:
                return appended, refused
            appended += one
        return appended, None
    for fact, outcome in zip(facts, outcomes, strict=False):
        if isinstance(outcome, ConflictingDuplicate):
            return appended, Refused(fact, str(outcome))
        appended.append(outcome)
    return appended, None


async def verified(ref: ObjectRef, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    check = Check(ref)
    async for piece in pieces:
        check.add(piece)
        yield piece
    check.conclude()


def artifact_of(fact: Fact) -> ObjectRef | None:
    """What has to be there before the fact is; None for one that refers to nothing that a boundary could keep."""
    text = fact.object_json
    if "\\" not in text and ('"digest"' not in text or '"bucket"' not in text):
        return None  # as most: without looking closer
    try:
        ref = reference_of(fact)
        check_object_name(ref.bucket, ref.key)
    except (BadReferenceError, InvalidArgument):
        return None
    return ref

"""Errors as they come back from a call: the one that the boundary raised, or why there was no boundary to raise one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from connectrpc.errors import ConnectError

from onceward.boundary import errors
from onceward.boundary.errors import BoundaryError
from onceward.boundary.unreached import unreached
from onceward.boundary.v1 import boundary_pb as pb

_BY_REASON: Mapping[str, type[BoundaryError]] = {
    kind.reason: kind
    for kind in (
        errors.ConflictingDuplicate,
        errors.ObjectConflict,
        errors.ArtifactMissing,
        errors.Backpressure,
    )
}
_BY_CODE: Mapping[str, type[BoundaryError]] = {
    "deadline_exceeded": errors.Unavailable,
    **{
        kind.code: kind
        for kind in (
            errors.InvalidArgument,
            errors.OffsetOutOfRange,
            errors.NotFound,
            errors.PermissionDenied,
            errors.Unauthenticated,
            errors.Unavailable,
        )
    },
}


def failure(error: ConnectError, url: str) -> BaseException:
    """The error as it was raised on the other side."""
    if isinstance(error.__cause__, asyncio.CancelledError):
        return error.__cause__  # the library makes an error of it; a task that is cancelled has to end
    detail = next((found for each in error.details if (found := each.value(pb.ErrorDetail))), None)
    if detail is None:
        return _from_elsewhere(error, url)
    kind = _BY_REASON.get(detail.reason) or _BY_CODE.get(error.code.value) or BoundaryError
    made = _made(kind, error.message)
    if isinstance(made, errors.ConflictingDuplicate):
        made.original_offset = detail.original_offset
    if detail.field:
        made.field = detail.field
    return made


def _from_elsewhere(error: ConnectError, url: str) -> BoundaryError:
    """Of the network, which has a cause on this side, of a proxy, or of something that is no boundary at all."""
    code = error.code.value
    kind = _BY_CODE.get(code, BoundaryError)
    if error.__cause__ is not None:
        words = unreached(url, error.__cause__)
    else:
        hint = "; see that its URL is that of a boundary" if kind is BoundaryError else ""
        words = f"{url} cannot be used: {error.message} ({code}){hint}"
    made = _made(kind, words)
    made.code = code
    return made


def _made(kind: type[BoundaryError], message: str) -> BoundaryError:
    made = kind.__new__(kind)
    made.args = (message,)
    return made

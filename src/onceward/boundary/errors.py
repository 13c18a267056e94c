"""What a boundary can refuse, each with the code under which it crosses the wire.

BoundaryError (OncewardError)
├── InvalidArgument        invalid_argument     a field is missing or malformed; names the field
├── ConflictingDuplicate   already_exists       the message_id is known with other content
├── ObjectConflict         already_exists       the object is there with other bytes
├── OffsetOutOfRange       out_of_range         a confirm beyond the last fact
├── NotFound               not_found            no such object, or no such consumer
├── ArtifactMissing        failed_precondition  a fact names an object that is not here
├── Backpressure           resource_exhausted   the store is too full; try again later, with the same id
├── PermissionDenied       permission_denied    this peer may not say that
├── Unauthenticated        unauthenticated      nobody knows this peer
└── Unavailable            unavailable          the store cannot work now; try again, with the same id
"""

from __future__ import annotations

from onceward.errors import OncewardError


class BoundaryError(OncewardError):
    """The base of what a boundary refuses."""

    code = "internal"
    reason = ""
    """More exact than the code, where that says too little."""
    field = ""
    """Which field is to blame."""
    retryable = False


class InvalidArgument(BoundaryError):
    code = "invalid_argument"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


class ConflictingDuplicate(BoundaryError):
    code = "already_exists"
    reason = "conflicting_duplicate"

    def __init__(self, message_id: str, original_offset: int) -> None:
        super().__init__(
            f"message_id {message_id!r} is known, at offset {original_offset}, with other content; a fact is never "
            "changed: a correction is a new fact with a new id"
        )
        self.original_offset = original_offset


class ObjectConflict(BoundaryError):
    code = "already_exists"
    reason = "object_conflict"

    def __init__(self, bucket: str, key: str) -> None:
        super().__init__(
            f"object {bucket}/{key} is there with other bytes; objects are never changed: use another key"
        )


class OffsetOutOfRange(BoundaryError):
    code = "out_of_range"
    field = "offset"


class NotFound(BoundaryError):
    code = "not_found"


class ArtifactMissing(BoundaryError):
    code = "failed_precondition"
    reason = "artifact_missing"
    field = "fact.object_json"


class Backpressure(BoundaryError):
    code = "resource_exhausted"
    reason = "backpressure"
    retryable = True


class PermissionDenied(BoundaryError):
    code = "permission_denied"


class Unauthenticated(BoundaryError):
    code = "unauthenticated"


class Unavailable(BoundaryError):
    code = "unavailable"
    retryable = True

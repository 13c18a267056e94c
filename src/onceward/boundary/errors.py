"""The errors of a boundary, each with its code on the wire.

BoundaryError (OncewardError)
├── InvalidArgument        invalid_argument     a field is missing or malformed; names the field
├── ConflictingDuplicate   already_exists       the message_id exists with different content
├── ObjectConflict         already_exists       the object exists with different bytes
├── OffsetOutOfRange       out_of_range         a confirm beyond the last fact
├── NotFound               not_found            no such object, or no such consumer
├── ArtifactMissing        failed_precondition  a fact names an object that does not exist here
├── Backpressure           resource_exhausted   the store is too full; try again later, with the same id
├── QuotaExceeded          resource_exhausted   no more consumer names or objects; an operator removes one, or raises it
├── PermissionDenied       permission_denied    this peer may not do that
├── Unauthenticated        unauthenticated      this peer is unknown
├── Canceled               canceled             the caller went away before its request was complete
├── Aborted                aborted              not tried, because a fact before it was refused
└── Unavailable            unavailable          the store does not work now; try again, with the same id
"""

from __future__ import annotations

from onceward.errors import OncewardError


class BoundaryError(OncewardError):
    """Base class of a boundary's errors."""

    code = "internal"
    reason = ""
    """More specific than the code, where that says too little."""
    field = ""
    """The field at fault, if any."""
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
            f"message_id {message_id!r} already exists at offset {original_offset} with different content; facts never "
            "change: append a correction as a new fact with a new id"
        )
        self.original_offset = original_offset


class ObjectConflict(BoundaryError):
    code = "already_exists"
    reason = "object_conflict"

    def __init__(self, bucket: str, key: str) -> None:
        super().__init__(
            f"object {bucket}/{key} already exists with different bytes; objects never change: use another key"
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


class QuotaExceeded(BoundaryError):
    code = "resource_exhausted"
    reason = "quota_exceeded"
    retryable = True


class AccessRefused(BoundaryError):
    def __init__(self, reason: str, problem: str, field: str = "") -> None:
        super().__init__(problem)
        self.reason, self.field = reason, field


class PermissionDenied(AccessRefused):
    code = "permission_denied"


class Unauthenticated(AccessRefused):
    code = "unauthenticated"


class Canceled(BoundaryError):
    code = "canceled"


class Aborted(BoundaryError):
    code = "aborted"
    retryable = True

    def __init__(self, message_id: str) -> None:
        super().__init__(
            f"{message_id!r:.80} was not appended, because a fact before it was refused; append it after that one"
        )


class Unavailable(BoundaryError):
    code = "unavailable"
    retryable = True


def holds_up(outcome: object) -> bool:
    """Return whether facts that are appended in order must wait behind one with this outcome. A conflict stays one,
    whatever comes later."""
    return isinstance(outcome, BoundaryError) and not isinstance(outcome, ConflictingDuplicate)

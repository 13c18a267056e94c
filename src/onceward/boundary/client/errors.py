"""Errors as they come back from a call: the one that the boundary raised, or why there was no boundary to raise one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from connectrpc.errors import ConnectError

from onceward.boundary import errors
from onceward.boundary.errors import BoundaryError
from onceward.boundary.v1 import boundary_pb as pb

# Why a boundary could not be reached, and what to do about it, in one line for people.
#
# Libraries say it each in their own way, and some with a page. What they all mean is a handful of mistakes.


SEE_THAT_IT_RUNS = "see that it runs (`onceward boundary serve`), or mend its URL"
FILES = "`tls`, for commands ONCEWARD_BOUNDARY_CA, _CERT and _KEY"


class Mistake(NamedTuple):
    scheme: str
    """Of the URL, or nothing if it does not matter."""
    words: str
    """A pattern of what libraries say."""
    what: str
    remedy: str


MISTAKES = (
    Mistake(
        "",
        r"dns error|Name or service not known|name resolution|nodename nor servname|No address associated",
        "no host {host!r} is known here",
        "mend its URL",
    ),
    Mistake(
        "https",
        r"not valid for name|NotValidForName|[Hh]ostname mismatch|IP address mismatch",
        "its certificate is not for {host!r}",
        "call it by a name that stands in its certificate, or give it one for this name",
    ),
    Mistake(
        "https",
        r"[Ee]xpired",
        "its certificate has expired",
        "replace that at the server",
    ),
    Mistake(
        "https",
        r"invalid peer certificate|certificate verify failed",
        "its certificate is not of a CA that is trusted here",
        f"name its CA in {FILES}",
    ),
    Mistake(
        "https",
        r"InvalidContentType|wrong version number|WRONG_VERSION_NUMBER|record layer failure",
        "it does not speak TLS",
        "its URL begins with http://",
    ),
    Mistake(
        "https",
        r"alert|close_notify|closed|reset|Broken pipe|EOF",
        "it hung up: it has stopped, or does not accept the certificate that it was shown, if any",
        f"see its log; the certificate to show is that of {FILES}",
    ),
    Mistake(
        "http",
        r"connection closed|closed connection|reset|InvalidMessage|invalid HTTP",
        "it hung up",
        f"{SEE_THAT_IT_RUNS}; if it speaks TLS, that begins with https://",
    ),
)


def unreached(url: str, error: BaseException) -> str:
    """`error` is what the network's library raised."""
    said = re.sub(r" \(os error \d+\)$", "", str(error).rpartition("): ")[2]) or "no answer in time"
    place = urlsplit(url)
    what, remedy = said, SEE_THAT_IT_RUNS
    for mistake in MISTAKES:
        if mistake.scheme in ("", place.scheme) and re.search(mistake.words, said):
            what, remedy = mistake.what.format(host=place.hostname), mistake.remedy
            break
    return f"the boundary at {url} cannot be reached: {what}; {remedy}"


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

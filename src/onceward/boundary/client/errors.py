"""Turns a failed call into an error: the one that the boundary raised, or one that says why it could not be reached.

Libraries describe a failed connection each in its own way, some with a page of text. Most of them mean one of a handful
of mistakes, each of which gets one line here, with its remedy.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from connectrpc.errors import ConnectError

from onceward._secrets import mask, mask_url
from onceward.boundary import errors
from onceward.boundary.errors import BoundaryError
from onceward.boundary.v1 import boundary_pb as pb

CHECK_IT_RUNS = "check that it is running (`onceward boundary serve`), or correct its URL"
IF_TLS = f"{CHECK_IT_RUNS}; if it speaks TLS, the URL begins with https://"
FILES = "`tls` (for commands: ONCEWARD_BOUNDARY_CA, _CERT and _KEY)"


class Mistake(NamedTuple):
    scheme: str
    """Of the URL; empty for any."""
    pattern: str
    """Matches what libraries say."""
    what: str
    remedy: str


MISTAKES = (
    Mistake(
        "",
        r"dns error|Name or service not known|name resolution|nodename nor servname|No address associated",
        "host {host!r} is unknown here",
        "correct its URL",
    ),
    Mistake(
        "https",
        r"not valid for name|NotValidForName|[Hh]ostname mismatch|IP address mismatch",
        "its certificate is not for {host!r}",
        "use a name that is in its certificate, or give it a certificate for this name",
    ),
    Mistake(
        "https",
        r"[Ee]xpired",
        "its certificate has expired",
        "replace it on the server",
    ),
    Mistake(
        "https",
        r"invalid peer certificate|certificate verify failed",
        "its certificate was not issued by a CA that is trusted here",
        f"set its CA in {FILES}",
    ),
    Mistake(
        "https",
        r"InvalidContentType|wrong version number|WRONG_VERSION_NUMBER|record layer failure",
        "it does not speak TLS",
        "use a URL that begins with http://",
    ),
    Mistake(
        "https",
        r"alert|close_notify|closed|reset|Broken pipe|EOF",
        "it closed the connection: it has stopped, or it requires another client certificate",
        f"see its log; set the client certificate in {FILES}",
    ),
    Mistake(
        "http",
        r"connection closed|closed connection|reset",
        "it closed the connection",
        IF_TLS,
    ),
    Mistake(
        "http",
        r"InvalidMessage|invalid HTTP",
        "its answer is not HTTP",
        IF_TLS,
    ),
)


def describe_unreachable(url: str, error: BaseException) -> str:
    """Say why the boundary cannot be reached, and what to do. `error` is what the network library raised."""
    said = re.sub(r" \(os error \d+\)$", "", str(error).rpartition("): ")[2]) or "no answer in time"
    place = urlsplit(url)
    what, remedy = said, CHECK_IT_RUNS
    for mistake in MISTAKES:
        if mistake.scheme in ("", place.scheme) and re.search(mistake.pattern, said):
            what, remedy = mistake.what.format(host=place.hostname), mistake.remedy
            break
    return f"the boundary at {mask_url(url)} cannot be reached: {mask(what)}; {remedy}"


_BY_REASON: Mapping[str, type[BoundaryError]] = {
    kind.reason: kind
    for kind in (
        errors.ConflictingDuplicate,
        errors.ObjectConflict,
        errors.ArtifactMissing,
        errors.Backpressure,
        errors.QuotaExceeded,
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
            errors.Canceled,
            errors.Aborted,
        )
    },
}


def failure(error: ConnectError, url: str) -> BaseException:
    """Return the error as the boundary raised it, or the one that kept the call from reaching it."""
    if isinstance(error.__cause__, asyncio.CancelledError):
        return error.__cause__  # the library wraps it, but a canceled task must end
    detail = next((found for each in error.details if (found := each.value(pb.ErrorDetail))), None)
    return _from_elsewhere(error, url) if detail is None else refused(error.code.value, error.message, detail)


def refused(code: str, message: str, detail: pb.ErrorDetail) -> BoundaryError:
    """Return the error that the boundary raised."""
    kind = _BY_REASON.get(detail.reason) or _BY_CODE.get(code) or BoundaryError
    raised = _build_error(kind, message)
    if isinstance(raised, errors.ConflictingDuplicate):
        raised.original_offset = detail.original_offset
    if detail.field:
        raised.field = detail.field
    return raised


def _from_elsewhere(error: ConnectError, url: str) -> BoundaryError:
    """An error of the network, which has a cause on this side, of a proxy, or of something that is not a boundary."""
    code = error.code.value
    kind = _BY_CODE.get(code, BoundaryError)
    if (
        error.__cause__ is not None and kind is errors.InvalidArgument
    ):  # what was sent was encoded before the call
        kind, code = BoundaryError, BoundaryError.code
        message = f"{mask_url(url)} sent an answer that cannot be read: {mask(str(error.__cause__))}"
    elif error.__cause__ is not None:
        message = describe_unreachable(url, error.__cause__)
    else:
        hint = "; check that this is the URL of a boundary" if kind is BoundaryError else ""
        message = f"{mask_url(url)} cannot be used: {mask(error.message)} ({code}){hint}"
    raised = _build_error(kind, message)
    raised.code = code
    return raised


def _build_error(kind: type[BoundaryError], message: str) -> BoundaryError:
    error = kind.__new__(kind)
    error.args = (message,)
    return error

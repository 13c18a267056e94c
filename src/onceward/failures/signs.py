"""Signs of an outage in the errors of common libraries, and how long their servers ask to wait.

An error is recognized by the names of its classes, so no library is imported: the handler has done that. Plain
`OSError` is a sign only by its number: a missing file is one, too.
"""

from __future__ import annotations

import errno
import http.client
import socket
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Final

from onceward._time import wall

STATUSES: Final = frozenset({429, 502, 503, 504})
"""Of HTTP: too many requests, bad gateway, unavailable, gateway timeout."""
SMTP_CODES: Final = frozenset({421, 451, 454})
"""Of SMTP: closing down, a local error, a temporary authentication failure."""
AWS_CODES: Final = frozenset(
    {
        "BandwidthLimitExceeded", "InternalError", "LimitExceededException", "PriorRequestNotComplete",
        "ProvisionedThroughputExceededException", "RequestLimitExceeded", "RequestThrottled", "RequestTimeout",
        "RequestTimeoutException", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException",
        "ThrottledException", "TooManyRequestsException", "TransactionInProgressException",
    }
)  # fmt: skip
LONGEST_RETRY_AFTER: Final = 3600.0
"""Seconds. A server that asks for more is asked again after this time."""

SIGNS: Final = frozenset(
    {
        ("aiohttp", "ClientConnectionError"), ("aiohttp", "ClientPayloadError"),
        ("botocore", "ConnectionError"), ("botocore", "HTTPClientError"),
        ("httpcore", "NetworkError"), ("httpcore", "RemoteProtocolError"), ("httpcore", "TimeoutException"),
        ("httpx", "NetworkError"), ("httpx", "ProxyError"), ("httpx", "RemoteProtocolError"),
        ("httpx", "TimeoutException"),
        ("requests", "ChunkedEncodingError"), ("requests", "ConnectionError"), ("requests", "Timeout"),
        ("smtplib", "SMTPConnectError"), ("smtplib", "SMTPServerDisconnected"),
        ("ssl", "SSLEOFError"), ("ssl", "SSLZeroReturnError"),
        ("urllib3", "MaxRetryError"), ("urllib3", "NewConnectionError"), ("urllib3", "ProtocolError"),
        ("urllib3", "TimeoutError"),
    }
)  # fmt: skip
"""Package and class of errors that mean: not reached, or no answer in time."""
MISTAKES: Final = frozenset(
    {("requests", "InvalidProxyURL"), ("aiohttp", "InvalidURL"), ("requests", "InvalidURL")}
)
"""Classes derived from those above that are errors of the program."""
BUILT_IN: Final = (ConnectionError, TimeoutError, socket.gaierror, socket.herror, http.client.IncompleteRead)
NUMBERS: Final = frozenset(
    getattr(errno, name)
    for name in ("ENETDOWN", "ENETUNREACH", "ENETRESET", "ENONET", "EHOSTDOWN", "EHOSTUNREACH")
    if hasattr(errno, name)
)
"""Of an `OSError`: there is no way to the host."""


_kinds: dict[type, bool] = {}
"""What was found out about each class."""


def _is_sign(kind: type[BaseException]) -> bool:
    if kind not in _kinds:
        _kinds[kind] = _look_up(kind)
    return _kinds[kind]


def _look_up(kind: type[BaseException]) -> bool:
    names = {(each.__module__.partition(".")[0], each.__name__) for each in kind.__mro__}
    return not names & MISTAKES and (issubclass(kind, BUILT_IN) or bool(names & SIGNS))


def is_sign_of_outage(error: BaseException) -> bool:
    """Whether the error means that a service is unreachable, overloaded or down."""
    if _is_sign(type(error)):
        return True
    if isinstance(error, OSError) and error.errno in NUMBERS:
        return True
    packages = _packages_of(error)
    reason = _attribute(error, "reason")
    if "urllib" in packages and isinstance(reason, BaseException):
        return is_sign_of_outage(reason)
    if "smtplib" in packages:
        return _smtp_codes_of(error) <= SMTP_CODES
    return status_of(error) in STATUSES or aws_code_of(error) in AWS_CODES


def _smtp_codes_of(error: BaseException) -> set[Any]:
    """What the server answered: for each recipient, if it refused all of them."""
    refused = _attribute(error, "recipients")
    if isinstance(refused, dict) and refused:
        return {each[0] for each in refused.values()}
    return {_attribute(error, "smtp_code")}


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error carries, of httpx, requests, aiohttp, urllib or botocore."""
    packages = _packages_of(error)
    if "aiohttp" in packages:
        return _number(_attribute(error, "status"))
    if "urllib" in packages:
        return _number(_attribute(error, "code"))
    response = _attribute(error, "response")
    if isinstance(response, dict):
        return _number(_item(_item(response, "ResponseMetadata"), "HTTPStatusCode"))
    return _number(_attribute(response, "status_code"))


def _packages_of(error: BaseException) -> set[str]:
    """Where its class, and those that this one is derived from, are defined."""
    return {each.__module__.partition(".")[0] for each in type(error).__mro__}


def aws_code_of(error: BaseException) -> Any:
    """The code of an error of botocore, such as `SlowDown`."""
    code = _item(_item(_attribute(error, "response"), "Error"), "Code")
    return code if isinstance(code, str) else None


def retry_after_of(error: BaseException) -> float | None:
    """Seconds that the server asks to wait, in a Retry-After header: a number or an HTTP date. At most an hour."""
    response = _attribute(error, "response")
    if isinstance(response, dict):
        headers = _item(_item(response, "ResponseMetadata"), "HTTPHeaders")
    else:
        headers = _attribute(response, "headers")
        headers = _attribute(error, "headers") if headers is None else headers
    text = _header(headers)
    seconds = None if text is None else _seconds(text.strip())
    return None if seconds is None else min(max(seconds, 0.0), LONGEST_RETRY_AFTER)


def _seconds(text: str) -> float | None:
    if text.isascii() and text.isdigit():
        return float(text[:12])
    try:
        at = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return at.timestamp() - wall()


def _header(headers: Any) -> str | None:
    for name in ("retry-after", "Retry-After"):
        found = _item(headers, name)
        if isinstance(found, str):
            return found
    return None


def _attribute(thing: Any, name: str) -> Any:
    try:
        return getattr(thing, name, None)
    except Exception:  # noqa: BLE001  a property of a foreign class; httpx raises RuntimeError without a request
        return None


def _item(thing: Any, name: str) -> Any:
    try:
        return None if thing is None else thing.get(name)
    except Exception:  # noqa: BLE001  not a mapping
        return None


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None

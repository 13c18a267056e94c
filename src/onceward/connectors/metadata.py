"""What may travel in a transaction's metadata: system context, trace context, and never a credential."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_log = logging.getLogger(__name__)
_propagator = TraceContextTextMapPropagator()

CREDENTIAL_KEYS = frozenset(
    {
        "authorization",
        "proxy-authorization",
        "cookie",
        "set-cookie",
        "password",
        "passwd",
        "secret",
        "api-key",
        "api_key",
        "x-api-key",
        "access_token",
        "refresh_token",
        "private_key",
    }
)
"""Names, in lower case, under which systems are known to keep credentials."""

# https://www.w3.org/TR/trace-context/: only version 00 ends here; later versions may go on after a dash.
_TRACEPARENT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?"
)


def sanitise_metadata(metadata: Mapping[Any, Any]) -> dict[str, Any]:
    """The part of incoming metadata that a transaction may carry.

    Leaves out keys that are not strings, keys that name a credential, and a `traceparent` that is not one.
    What was left out is logged by name; values are never logged.
    """
    refused = [key for key, value in metadata.items() if not _is_welcome(key, value)]
    if refused:
        _log.warning("dropped metadata on arrival: %s", ", ".join(f"{key!r:.100}" for key in refused))
    return {key: value for key, value in metadata.items() if _is_welcome(key, value)}


def all_welcome(metadata: Mapping[Any, Any]) -> bool:
    """Whether `sanitise_metadata` would leave nothing out: the usual case, found out fast."""
    for key in metadata:
        if not isinstance(key, str) or key.lower() in CREDENTIAL_KEYS:
            return False
    return "traceparent" not in metadata or _is_traceparent(metadata["traceparent"])


def is_credential(key: str) -> bool:
    return key.lower() in CREDENTIAL_KEYS


def current_trace_context() -> dict[str, str]:
    """The W3C headers of the current span; empty when nothing is being traced."""
    carrier: dict[str, str] = {}
    span = trace.get_current_span()
    if span is not trace.INVALID_SPAN and span.get_span_context().is_valid:
        _propagator.inject(carrier)
    return carrier


def with_trace_context(metadata: Mapping[str, Any], trace_context: Mapping[str, str]) -> dict[str, Any]:
    """`metadata` with the trace it came with replaced, as a whole, by `trace_context`."""
    merged = {**metadata, **trace_context}
    if "tracestate" not in trace_context:
        merged.pop("tracestate", None)  # it belonged to the trace that was replaced
    return merged


def _is_welcome(key: Any, value: Any) -> bool:
    if not isinstance(key, str) or is_credential(key):
        return False
    return key != "traceparent" or _is_traceparent(value)


def _is_traceparent(value: Any) -> bool:
    match = _TRACEPARENT.fullmatch(value) if isinstance(value, str) else None
    return match is not None and not (match["version"] == "00" and match["more"])

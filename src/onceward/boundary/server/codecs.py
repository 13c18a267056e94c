"""Encoding of messages, as protobuf and as its JSON, compressed or not, and of errors."""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Any, Protocol

import msgspec
from connectrpc.code import Code
from connectrpc.codec import proto_binary_codec
from connectrpc.compression.gzip import GzipCompression
from connectrpc.errors import ConnectError

from onceward.boundary.errors import BoundaryError, InvalidArgument
from onceward.boundary.model import Appended
from onceward.boundary.v1 import boundary_pb as pb

_PARENTS = {"Envelope": "envelope", "Fact": "fact"}
"""Fields of a request that hold these messages; all others are requests themselves."""


class ReadyPage:
    """An encoded `FetchFactsResponse`."""

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded


class BinaryCodec:
    """Protobuf. A `ReadyPage` is sent as it is."""

    def name(self) -> str:
        return "proto"

    def encode(self, message: Any) -> bytes:
        if type(message) is ReadyPage:
            return message.encoded
        return bytes(message.to_binary())

    def decode(self, data: bytes | bytearray, message_class: Any) -> Any:
        return proto_binary_codec().decode(data, message_class)


class JsonCodec:
    """Protobuf's JSON. Unknown fields are refused: they are misspelled ones."""

    def name(self) -> str:
        return "json"

    def encode(self, message: Any) -> bytes:
        if type(message) is ReadyPage:
            message = pb.FetchFactsResponse.from_binary(message.encoded)
        return str(message.to_json()).encode()

    def decode(self, data: bytes | bytearray, message_class: Any) -> Any:
        try:
            _refuse_fractions(msgspec.json.decode(data), "")
            return message_class.from_json(data, ignore_unknown_fields=False)
        except InvalidArgument as error:
            raise refusal(error) from None
        except Exception as error:  # noqa: BLE001  whatever the parser raises is the caller's mistake
            raise refusal(_invalid_argument(str(error))) from None


class Arriving(Protocol):
    def expand(self, size: int) -> None:
        """Count a message with the bytes that it has expanded to, or refuse it."""

    def waste(self, size: int) -> None:
        """Take note of bytes that the error of this call may hold."""


ARRIVING: ContextVar[Arriving] = ContextVar("arriving")
"""The messages of the current call."""


class CountedGzip(GzipCompression):
    """A few kilobytes can expand to many megabytes, which count like those that arrive."""

    def decompress(self, data: bytes | bytearray | memoryview, read_max_bytes: int | None = None) -> bytes:
        arriving = ARRIVING.get(None)
        try:
            plain = super().decompress(data, read_max_bytes)
        except Exception:
            if arriving is not None:
                arriving.waste(read_max_bytes or 0)  # at most, by then
            raise
        if arriving is not None:
            arriving.expand(len(plain))
        return plain


def refusal(error: BoundaryError) -> ConnectError:
    """Encode an error for the wire."""
    return ConnectError(Code(error.code), str(error), [_detail(error)])


def outcome(of: Appended | BoundaryError) -> pb.AppendOutcome:
    """Encode what became of one of several facts."""
    if isinstance(of, Appended):
        return pb.AppendOutcome(offset=of.offset, duplicate=of.duplicate)
    return pb.AppendOutcome(refusal=pb.Refusal(code=of.code, message=str(of), detail=_detail(of)))


def _detail(error: BoundaryError) -> pb.ErrorDetail:
    return pb.ErrorDetail(
        reason=error.reason, field=error.field, original_offset=getattr(error, "original_offset", 0)
    )


def _refuse_fractions(value: Any, path: str) -> None:
    """No field is a float, but protobuf would accept 1.0 for 1."""
    if isinstance(value, float):
        raise InvalidArgument(_snake(path) or "request", f"must be an integer, not {value}")
    if isinstance(value, dict):
        for name, each in value.items():
            _refuse_fractions(each, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for each in value:
            _refuse_fractions(each, path)


def _invalid_argument(message: str) -> InvalidArgument:
    """Turn the parser's message into an error with the field that it is about."""
    if found := re.search(r" for field onceward\.boundary\.v1\.(\w+)\.(\w+)$", message):
        return InvalidArgument(_path(found[1], found[2]), f"cannot be read: {message[: found.start()]}")
    if found := re.search(
        r"cannot decode onceward\.boundary\.v1\.(\w+) from JSON: key: '(.*)' is unknown", message
    ):
        return InvalidArgument(_path(found[1], found[2]), f"is unknown: {found[1]} has no such field")
    if found := re.search(r"cannot decode (\w+) from JSON", message):
        return InvalidArgument(_PARENTS.get(found[1], "request"), "must be a JSON object")
    return InvalidArgument("request", f"is not JSON: {message}")


def _path(message: str, field: str) -> str:
    parent = _PARENTS.get(message)
    return field if parent is None else f"{parent}.{field}"


def _snake(path: str) -> str:
    return re.sub(r"(?<=[a-z])([A-Z])", lambda found: "_" + found[1].lower(), path)

"""What JetStream's API answers, as far as it is looked at here."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode
from datetime import datetime

import msgspec

NO_MESSAGE = 10037
NOT_THERE = 10043
NO_STREAM = 10059
NO_JETSTREAM = (10039, 10076)
"""For the account, and at all."""
NO_CLUSTER = 10074
"""For more than one replica."""
ANOTHER_LAST = (10071, 10164)
"""The subject has another last message; a message of that subject is on its way through the cluster."""


class Problem(msgspec.Struct, frozen=True):
    err_code: int = 0
    description: str = ""


class Answer(msgspec.Struct, frozen=True):
    """Of JetStream's API."""

    error: Problem | None = None

    @property
    def problem(self) -> int:
        return 0 if self.error is None else self.error.err_code


class Taken(Answer, frozen=True):
    seq: int = 0


class Kept(msgspec.Struct, frozen=True):
    """A message in a stream."""

    seq: int
    data: bytes = b""
    hdrs: bytes = b""
    time: datetime | None = None

    @property
    def headers(self) -> dict[str, str]:
        lines = (line.partition(":") for line in self.hdrs.decode().split("\r\n"))
        return {name: value.strip() for name, colon, value in lines if colon}


class Found(Answer, frozen=True):
    message: Kept | None = None


class StreamConfig(msgspec.Struct, frozen=True):
    """What of a stream's configuration this store depends on."""

    subjects: list[str]
    storage: str
    num_replicas: int
    allow_direct: bool = False
    allow_atomic: bool = False


class State(msgspec.Struct, frozen=True):
    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    subjects: dict[str, int] = {}


class Info(Answer, frozen=True):
    config: StreamConfig | None = None
    state: State | None = None


class Removed(Answer, frozen=True):
    purged: int = 0


def token(text: str) -> str:
    """A part of a subject for any text: a subject cannot have blanks, dots and stars in it."""
    return urlsafe_b64encode(hashlib.sha256(text.encode()).digest()[:24]).decode()

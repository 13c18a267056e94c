"""Answers of JetStream's API; only the fields used here."""

from __future__ import annotations

from datetime import datetime
from typing import Any, TypeVar

import msgspec

NOT_STORED, NO_STORAGE = 10077, 10047

T = TypeVar("T", bound="Answer")


class Problem(msgspec.Struct, frozen=True):
    err_code: int = 0
    description: str = ""


class Answer(msgspec.Struct, frozen=True):
    error: Problem | None = None

    @property
    def problem(self) -> int:
        return 0 if self.error is None else self.error.err_code


class Taken(Answer, frozen=True):
    seq: int = 0


class KeptMessage(msgspec.Struct, frozen=True):
    """A message in a stream."""

    seq: int
    subject: str = ""
    data: bytes = b""
    hdrs: bytes = b""
    time: datetime | None = None

    @property
    def headers(self) -> dict[str, str]:
        lines = (line.partition(":") for line in self.hdrs.decode().split("\r\n"))
        return {name: value.strip() for name, colon, value in lines if colon}


class FoundMessage(Answer, frozen=True):
    message: KeptMessage | None = None


class StreamConfig(msgspec.Struct, frozen=True):
    """The part of a stream's configuration that this store depends on."""

    subjects: list[str]
    storage: str
    num_replicas: int
    allow_direct: bool = False
    allow_atomic: bool = False


class StreamState(msgspec.Struct, frozen=True):
    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    num_subjects: int = 0
    consumer_count: int = 0
    num_deleted: int = 0
    deleted: list[int] | None = None
    """Sequences between the first and the last, if they were asked for."""
    subjects: dict[str, int] = {}


class Info(Answer, frozen=True):
    config: StreamConfig | None = None
    state: StreamState | None = None


class Configured(Answer, frozen=True):
    config: dict[str, Any] = {}


class Removed(Answer, frozen=True):
    purged: int = 0


def is_full(problem: Problem) -> bool:
    """The stream, the account or the server has no room. Other causes have the first of these codes, too."""
    return problem.err_code == NO_STORAGE or (
        problem.err_code == NOT_STORED and problem.description.startswith("maximum")
    )

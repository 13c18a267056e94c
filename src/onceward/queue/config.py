"""The settings of a queue: stream, group, consumer name, and how long to wait."""

from __future__ import annotations

from dataclasses import dataclass

from onceward.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Settings that cannot work raise `ConfigurationError` here, not later."""

    stream_key: str
    consumer_group: str
    consumer_name: str
    """Unique in the group: two consumers with one name share their pending messages."""
    block_ms: int = 5000
    """How long a read waits in Redis for a message."""
    claim_idle_ms: int = 60000
    """How long a message must be pending to be stale. Make it longer than the longest handler, or it runs twice."""
    claim_skip_own_messages: bool = False
    """Whether `claim_stale` skips messages that are pending under this consumer's own name."""

    def __post_init__(self) -> None:
        for field in ("stream_key", "consumer_group", "consumer_name"):
            check_name(field, getattr(self, field))
        check_block_ms(self.block_ms)
        check_at_least("claim_idle_ms", self.claim_idle_ms, 0)
        if not isinstance(self.claim_skip_own_messages, bool):
            raise ConfigurationError(
                f"claim_skip_own_messages must be True or False, not {self.claim_skip_own_messages!r}"
            )


def check_name(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigurationError(f"{field} must be a string, not {type(value).__name__}")
    if not value.strip():
        raise ConfigurationError(f"{field} must not be empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{field} must be valid text, not {value!r}") from None


def check_block_ms(value: object) -> int:
    if value == 0 and not isinstance(value, bool):
        raise ConfigurationError("block_ms must not be 0: Redis would block forever; say how long to wait")
    return check_at_least("block_ms", value, 1)


def check_at_least(field: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigurationError(f"{field} must be a whole number, not {value!r}")
    if value < least:
        raise ConfigurationError(f"{field} must be at least {least}, not {value}")
    return value

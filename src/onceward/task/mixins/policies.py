"""Policies: how often, how long, how many at once. Frozen data, the same in every format.

A policy is built in Python, or loaded: `ConsumerPolicy.load("policy.toml")` (or `.json`),
`ConsumerPolicy.from_env("ORDERS_")`, `ConsumerPolicy.model_validate({...})`. Durations are seconds.
Tasks, connectors and services never see one.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from onceward.errors import ConfigurationError


def none_from_text(value: Any) -> Any:
    # TOML has no null and the environment has only strings.
    if isinstance(value, str) and value.strip().lower() in ("", "none", "null"):
        return None
    return value


def _must_be_json(value: dict[str, Any]) -> dict[str, Any]:
    # A policy is data: processes and versions exchange it.
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"must hold plain data only: {error}") from None
    return value


Timeout = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False)] | None,
    BeforeValidator(none_from_text),
    Field(description="Seconds, or None for no limit."),
]
Seconds = Annotated[NonNegativeFloat, Field(allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1, allow_inf_nan=False)]
OptionalCount = Annotated[PositiveInt | None, BeforeValidator(none_from_text)]


class Policy(BaseModel):
    """Base of every policy: frozen, rejects unknown fields, loads from files and the environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a `.toml` or `.json` file."""
        file = Path(path)
        if file.suffix == ".toml":
            try:
                tree = tomllib.loads(file.read_text("utf-8"))
            except tomllib.TOMLDecodeError as error:
                raise ConfigurationError(f"{file} is not valid TOML: {error}") from error
            return cls.model_validate(tree)
        if file.suffix == ".json":
            return cls.model_validate_json(file.read_bytes())
        raise ConfigurationError(f"{file}: a policy file must end in .toml or .json")

    @classmethod
    def from_env(cls, prefix: str, environ: Mapping[str, str] | None = None) -> Self:
        """Read variables such as `PREFIX` + `LOOP__CONCURRENCY__VALUE=8`; two underscores separate nested fields."""
        import os

        from onceward._variables import NESTED, Variables

        given = {
            name[len(prefix) :].lower(): text
            for name, text in (os.environ if environ is None else environ).items()
            if name.upper().startswith(prefix.upper())
        }
        for name in given:
            if any(other.startswith(f"{name}{NESTED}") for other in given):
                raise ConfigurationError(
                    f"{prefix}{name.upper()} sets a field, but another variable sets a part of it; unset one of them"
                )
        return cls.model_validate(Variables(cls, given)())


# ── pieces ──────────────────────────────────────────────────────────────────────────────────────────────


class RetryPolicy(Policy):
    """Attempts at one step: after failed attempt n, wait `backoff * backoff_multiplier ** n` seconds."""

    max_attempts: PositiveInt = Field(default=1, description="Including the first attempt.")
    timeout: Timeout = Field(default=None, description="Seconds each attempt may take.")
    backoff: Seconds = 0.0
    backoff_multiplier: Factor = 2.0
    backoff_cap: Seconds = Field(default=0.0, description="The longest wait; 0 is no cap.")


class ConcurrencyPolicy(Policy):
    """How many transactions are in flight at once. `min` and `max` bound `value`."""

    value: PositiveInt = 1
    min: PositiveInt = 1
    max: OptionalCount = None

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        _check_between("value", self.value, "min", self.min, "max", self.max)
        return self


class BatchPolicy(Policy):
    """How many transactions are fetched at once. `min_size` and `max_size` bound `size`."""

    size: PositiveInt = 10
    min_size: PositiveInt = 1
    max_size: OptionalCount = None
    interval: Seconds = Field(default=0.0, description="Reserved.")

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        _check_between("size", self.size, "min_size", self.min_size, "max_size", self.max_size)
        return self


class EmptyQueuePolicy(Policy):
    """How long to wait after the nth empty fetch in a row. Only when streaming."""

    backoff: Seconds = 0.1
    backoff_multiplier: Factor = 2.0
    backoff_cap: Seconds = 5.0
    interval: Seconds = Field(default=0.0, description="Reserved.")


def _check_between(name: str, value: int, low_name: str, low: int, high_name: str, high: int | None) -> None:
    if value < low:
        raise ValueError(f"{name} is {value}, below {low_name} ({low})")
    if high is not None and value > high:
        raise ValueError(f"{name} is {value}, above {high_name} ({high})")


# ── steps ───────────────────────────────────────────────────────────────────────────────────────────────


class FetchPolicy(Policy):
    """How to fetch from the source. `retry` also applies to settling and extending leases."""

    retry: RetryPolicy = RetryPolicy()
    extra: Annotated[dict[str, Any], AfterValidator(_must_be_json)] = Field(
        default_factory=dict, description="Keyword arguments for the connector's fetch."
    )
    connector_name: Annotated[str | None, BeforeValidator(none_from_text)] = Field(
        default=None, description="The connector to fetch from; needed if a task has several."
    )


class ProcessPolicy(Policy):
    retry: RetryPolicy = RetryPolicy()


class ProducePolicy(Policy):
    retry: RetryPolicy = RetryPolicy()


class SuccessPolicy(Policy):
    retry: RetryPolicy = RetryPolicy()


class ExceptionPolicy(Policy):
    retry: RetryPolicy = RetryPolicy()


class ConsumerSteps(Policy):
    fetch: FetchPolicy = FetchPolicy()
    process: ProcessPolicy = ProcessPolicy()
    success: SuccessPolicy = SuccessPolicy()
    exception: ExceptionPolicy = ExceptionPolicy()


class ProducerSteps(Policy):
    produce: ProducePolicy = ProducePolicy()
    success: SuccessPolicy = SuccessPolicy()
    exception: ExceptionPolicy = ExceptionPolicy()


# ── loops ───────────────────────────────────────────────────────────────────────────────────────────────


class ProducerLoopPolicy(Policy):
    batch: BatchPolicy = BatchPolicy()
    concurrency: ConcurrencyPolicy = ConcurrencyPolicy()
    timeout: Timeout = Field(default=None, description="Seconds the whole call may take.")
    limit: Annotated[NonNegativeInt | None, BeforeValidator(none_from_text)] = Field(
        default=None, description="Maximum number of transactions to start; 0 is none, None is no limit."
    )
    transaction_timeout: Timeout = Field(
        default=None, description="Seconds one lifecycle may take, including retries and backoff."
    )


class ConsumerLoopPolicy(ProducerLoopPolicy):
    streaming: bool = Field(
        default=False, description="Wait for more when the source is empty, instead of ending."
    )
    empty_queue: EmptyQueuePolicy = EmptyQueuePolicy()
    mode: Literal["batch", "continuous"] = Field(
        default="batch",
        description="batch: fetch again when a batch is done. continuous: keep all slots full.",
    )


class ProducerPolicy(Policy):
    """The whole policy of `produce_transactions`."""

    loop: ProducerLoopPolicy = ProducerLoopPolicy()
    steps: ProducerSteps = ProducerSteps()


class ConsumerPolicy(Policy):
    """The whole policy of `consume_transactions`."""

    loop: ConsumerLoopPolicy = ConsumerLoopPolicy()
    steps: ConsumerSteps = ConsumerSteps()

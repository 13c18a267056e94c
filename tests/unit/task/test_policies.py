"""Policies are frozen data, the same in every notation, and refuse what cannot work."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from onceward.errors import ConfigurationError
from onceward.task.mixins.policies import (
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerLoopPolicy,
    ConsumerPolicy,
    ConsumerSteps,
    EmptyQueuePolicy,
    ExceptionPolicy,
    FetchPolicy,
    ProcessPolicy,
    ProducePolicy,
    ProducerLoopPolicy,
    ProducerPolicy,
    ProducerSteps,
    RetryPolicy,
    SuccessPolicy,
)
from onceward.task.settings import EngineSettings
from tests.support.world import (
    ListSource,
    World,
    business,
    consuming,
    producing,
    results,
    retry,
    system,
    transactions,
)

ALL: list[type[BaseModel]] = [
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerLoopPolicy,
    ConsumerPolicy,
    ConsumerSteps,
    EmptyQueuePolicy,
    EngineSettings,
    ExceptionPolicy,
    FetchPolicy,
    ProcessPolicy,
    ProducePolicy,
    ProducerLoopPolicy,
    ProducerPolicy,
    ProducerSteps,
    RetryPolicy,
    SuccessPolicy,
]
every_policy = pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────

NAN, INF = math.nan, math.inf
INVALID: list[tuple[type[BaseModel], str, list[Any]]] = [
    (RetryPolicy, "max_attempts", [0, -1, 1.5, None, "many", INF]),
    (RetryPolicy, "timeout", [0, -0.1, NAN, INF, "soon"]),
    (RetryPolicy, "backoff", [-0.1, NAN, INF, None, "soon"]),
    (RetryPolicy, "backoff_multiplier", [0.99, 0, -1, NAN, INF, None]),
    (RetryPolicy, "backoff_cap", [-1, NAN, INF, None]),
    (ConcurrencyPolicy, "value", [0, -1, 1.5, None]),
    (ConcurrencyPolicy, "min", [0, -1]),
    (ConcurrencyPolicy, "max", [0, -1]),
    (BatchPolicy, "size", [0, -1, 2.5, None]),
    (BatchPolicy, "min_size", [0, -1]),
    (BatchPolicy, "max_size", [0, -1]),
    (BatchPolicy, "interval", [-1, NAN, INF]),
    (EmptyQueuePolicy, "backoff", [-1, NAN, INF]),
    (EmptyQueuePolicy, "backoff_multiplier", [0.5, NAN]),
    (EmptyQueuePolicy, "backoff_cap", [-1, NAN, INF]),
    (EmptyQueuePolicy, "interval", [-1, NAN, INF]),
    (ProducerLoopPolicy, "timeout", [0, -1, NAN, INF]),
    (ProducerLoopPolicy, "limit", [-1, 1.5, "few"]),
    (ProducerLoopPolicy, "transaction_timeout", [0, -1, NAN, INF]),
    (ConsumerLoopPolicy, "timeout", [0, -1, NAN, INF]),
    (ConsumerLoopPolicy, "limit", [-1]),
    (ConsumerLoopPolicy, "transaction_timeout", [0, -1, NAN, INF]),
    (ConsumerLoopPolicy, "streaming", ["perhaps", 7, None]),
    (ConsumerLoopPolicy, "mode", ["", "fast", None]),
    (FetchPolicy, "extra", [7, [1], "not json", "[1]"]),
    (FetchPolicy, "connector_name", [7, ["a"]]),
    (EngineSettings, "stuck_grace", [-1, NAN, INF, None]),
]


@pytest.mark.req("CE-42")
@pytest.mark.parametrize(
    ("cls", "field", "value"), [(cls, field, value) for cls, field, values in INVALID for value in values]
)
def test_an_invalid_value_is_refused_with_its_field_named(cls: Any, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field) as raised:
        cls(**{field: value})
    assert isinstance(raised.value, ValidationError)
    assert raised.value.errors()[0]["loc"] == (field,)


@pytest.mark.req("CE-42")
@pytest.mark.parametrize(
    ("cls", "values", "fields"),
    [
        (ConcurrencyPolicy, {"value": 1, "min": 2}, ["value", "min"]),
        (ConcurrencyPolicy, {"value": 9, "max": 8}, ["value", "max"]),
        (ConcurrencyPolicy, {"value": 5, "min": 6, "max": 4}, ["value", "min"]),
        (BatchPolicy, {"size": 1, "min_size": 2}, ["size", "min_size"]),
        (BatchPolicy, {"size": 9, "max_size": 8}, ["size", "max_size"]),
    ],
)
def test_a_value_outside_its_own_bounds_is_refused_with_both_named(
    cls: Any, values: dict[str, Any], fields: list[str]
) -> None:
    with pytest.raises(ValidationError) as raised:
        cls(**values)
    assert all(field in str(raised.value) for field in fields)


@pytest.mark.req("CE-42")
@every_policy
def test_an_unknown_field_is_refused_and_named(cls: Any) -> None:
    with pytest.raises(ValidationError, match="max_atempts"):
        cls(max_atempts=3)


@pytest.mark.req("CE-42")
def test_an_invalid_value_deep_inside_is_named_by_its_path() -> None:
    given = {"steps": {"process": {"retry": {"max_attempts": 0}}}}
    with pytest.raises(ValidationError) as raised:
        ConsumerPolicy.model_validate(given)
    assert raised.value.errors()[0]["loc"] == ("steps", "process", "retry", "max_attempts")


@pytest.mark.req("CE-42")
def test_a_value_that_cannot_be_serialised_is_refused_in_extra() -> None:
    with pytest.raises(ValidationError, match="extra"):
        FetchPolicy(extra={"on_fetch": print})


@pytest.mark.req("CE-42")
@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (RetryPolicy, {"max_attempts": 1, "timeout": 0.001, "backoff": 0, "backoff_multiplier": 1}),
        (ConcurrencyPolicy, {"value": 2, "min": 2, "max": 2}),
        (BatchPolicy, {"size": 3, "min_size": 3, "max_size": 3}),
        (ProducerLoopPolicy, {"limit": 0}),
    ],
)
def test_a_value_on_its_bound_is_accepted(cls: Any, values: dict[str, Any]) -> None:
    assert cls(**values).model_dump(include=values) == values


# ── frozen ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-37")
@every_policy
def test_no_field_of_a_policy_can_be_set_or_deleted(cls: Any) -> None:
    policy = cls()
    for field in cls.model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(policy, field, getattr(policy, field))
        with pytest.raises(ValidationError, match="frozen"):
            delattr(policy, field)
    with pytest.raises(ValidationError):
        policy.something_new = 1


@pytest.mark.req("CE-37")
def test_two_default_policies_share_nothing_that_could_be_changed() -> None:
    first, second = ConsumerPolicy(), ConsumerPolicy()
    first.steps.fetch.extra["shard"] = 1
    assert second.steps.fetch.extra == {}
    assert ConsumerPolicy().steps.fetch.extra == {}


@pytest.mark.req("CE-37")
def test_the_engine_leaves_a_producer_policy_as_it_was(world: World) -> None:
    policy = producing(
        produce=retry(2, backoff=0.001), concurrency=2, batch=3, limit=5, transaction_timeout=9.0
    )
    before, dumped = copy.deepcopy(policy), policy.model_dump_json()
    world.produce(world.producer(results(system(), None, business())), transactions(6), policy)
    assert policy == before
    assert policy.model_dump_json() == dumped


class Meddler(ListSource):
    """A connector that modifies its arguments."""

    def _next(self, size: int, extra: dict[str, Any]) -> Any:
        extra["where"]["shards"].append(99)
        extra["where"]["new"] = True
        extra["more"] = 1
        return super()._next(size, extra)


@pytest.mark.req("CE-37")
def test_the_engine_leaves_a_consumer_policy_as_it_was_though_the_connector_changes_its_arguments(
    world: World,
) -> None:
    policy = consuming(extra={"where": {"shards": [1, 2]}}, process=retry(2), batch=2)
    before, dumped = copy.deepcopy(policy), policy.model_dump_json()
    source = Meddler(transactions(3))
    world.consume(world.consumer(source=source), policy)
    assert len(source.asked) == 3
    assert policy == before
    assert policy.model_dump_json() == dumped


@pytest.mark.req("CE-37")
def test_every_attempt_of_a_fetch_gets_the_arguments_of_the_policy(world: World) -> None:
    seen: list[list[int]] = []

    class Forgetful(ListSource):
        def _next(self, size: int, extra: dict[str, Any]) -> Any:
            seen.append(list(extra["shards"]))
            extra["shards"].clear()
            if len(seen) == 1:
                raise OSError
            return []

    world.consume(world.consumer(source=Forgetful()), consuming(extra={"shards": [1]}, fetch=retry(2)))
    assert seen == [[1], [1]]


# ── defaults, and older files ───────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-41")
@every_policy
def test_every_field_has_a_default(cls: Any) -> None:
    assert not [name for name, field in cls.model_fields.items() if field.is_required()]
    assert cls() == cls.model_validate({}) == cls.model_validate_json("{}")


def leaves(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in leaves(value, (*path, key))]
    return [(path, tree)]


@pytest.mark.req("CE-41")
@pytest.mark.parametrize("cls", [ConsumerPolicy, ProducerPolicy])
def test_default_attempts_and_waits_are_finite(cls: Any) -> None:
    values = leaves(cls().model_dump())
    numbers = [value for _, value in values if isinstance(value, (int, float))]
    assert len(numbers) > 10
    assert all(math.isfinite(number) for number in numbers)
    assert {value for path, value in values if path[-1] == "max_attempts"} == {1}


def without(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    pruned = copy.deepcopy(tree)
    node = pruned
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    return pruned


@pytest.mark.req("CE-41")
@pytest.mark.parametrize("cls", [ConsumerPolicy, ProducerPolicy])
def test_a_text_without_any_one_field_loads_as_the_default(cls: Any) -> None:
    whole = cls().model_dump(mode="json")
    for path, _ in leaves(whole):
        assert cls.model_validate_json(json.dumps(without(whole, path))) == cls(), path


@pytest.mark.req("CE-41")
def test_a_text_of_an_older_version_keeps_its_values_and_gets_defaults_for_the_rest() -> None:
    old = {"loop": {"batch": {"size": 50}, "limit": 7}, "steps": {"process": {"retry": {"max_attempts": 3}}}}
    assert ConsumerPolicy.model_validate_json(json.dumps(old)) == ConsumerPolicy(
        loop=ConsumerLoopPolicy(batch=BatchPolicy(size=50), limit=7),
        steps=ConsumerSteps(process=ProcessPolicy(retry=RetryPolicy(max_attempts=3))),
    )


# ── one policy, every notation ──────────────────────────────────────────────────────────────────────────

WANTED = ConsumerPolicy(
    loop=ConsumerLoopPolicy(
        batch=BatchPolicy(size=20, max_size=100),
        concurrency=ConcurrencyPolicy(value=8),
        timeout=None,
        limit=None,
        transaction_timeout=2.5,
        streaming=True,
        empty_queue=EmptyQueuePolicy(backoff=0.5),
        mode="continuous",
    ),
    steps=ConsumerSteps(
        fetch=FetchPolicy(
            retry=RetryPolicy(max_attempts=3, timeout=1.0), extra={"shard": [1, 2]}, connector_name="orders"
        ),
        process=ProcessPolicy(retry=RetryPolicy(timeout=None)),
    ),
)
TOML = """
[loop]
timeout = "none"
limit = ""
transaction_timeout = 2.5
streaming = true
mode = "continuous"
batch = { size = 20, max_size = 100 }
concurrency = { value = 8, max = "null" }
empty_queue = { backoff = 0.5 }

[steps.fetch]
connector_name = "orders"
retry = { max_attempts = 3, timeout = 1 }
extra = { shard = [1, 2] }

[steps.process.retry]
timeout = "None"
"""
ENVIRONMENT = {
    "ORDERS_LOOP__TIMEOUT": "none",
    "ORDERS_LOOP__LIMIT": "",
    "ORDERS_LOOP__TRANSACTION_TIMEOUT": "2.5",
    "ORDERS_LOOP__STREAMING": "true",
    "ORDERS_LOOP__MODE": "continuous",
    "ORDERS_LOOP__BATCH__SIZE": "20",
    "ORDERS_LOOP__BATCH__MAX_SIZE": "100",
    "ORDERS_LOOP__CONCURRENCY__VALUE": "8",
    "ORDERS_LOOP__CONCURRENCY__MAX": "null",
    "ORDERS_LOOP__EMPTY_QUEUE__BACKOFF": "0.5",
    "ORDERS_STEPS__FETCH__CONNECTOR_NAME": "orders",
    "ORDERS_STEPS__FETCH__RETRY__MAX_ATTEMPTS": "3",
    "ORDERS_STEPS__FETCH__RETRY__TIMEOUT": "1",
    "ORDERS_STEPS__FETCH__EXTRA": '{"shard": [1, 2]}',
    "ORDERS_STEPS__PROCESS__RETRY__TIMEOUT": " NULL ",
    "PATH": "/bin",
}


def test_a_policy_reads_the_same_from_toml(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(TOML)
    assert ConsumerPolicy.load(tmp_path / "policy.toml") == WANTED


def test_a_policy_reads_the_same_from_json(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text(WANTED.model_dump_json())
    assert ConsumerPolicy.load(str(tmp_path / "policy.json")) == WANTED


def test_a_policy_reads_the_same_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ConsumerPolicy.from_env("ORDERS_", ENVIRONMENT) == WANTED
    for name, text in ENVIRONMENT.items():
        monkeypatch.setenv(name, text)
    assert ConsumerPolicy.from_env("ORDERS_") == WANTED


def test_an_environment_without_the_prefix_gives_the_defaults() -> None:
    assert (
        ProducerPolicy.from_env("ORDERS_", {"LOOP__LIMIT": "3", "OTHER_LOOP__LIMIT": "4"}) == ProducerPolicy()
    )


def test_the_names_of_variables_may_be_of_any_case() -> None:
    assert ProducerPolicy.from_env("orders_", {"Orders_Loop__Limit": "3"}).loop.limit == 3


@pytest.mark.req("CE-42")
def test_an_invalid_variable_is_refused_with_its_path() -> None:
    with pytest.raises(ValidationError) as raised:
        ProducerPolicy.from_env("O_", {"O_LOOP__CONCURRENCY__VALUE": "0"})
    assert raised.value.errors()[0]["loc"] == ("loop", "concurrency", "value")


@pytest.mark.req("CE-42")
def test_an_unknown_variable_under_the_prefix_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="concurency"):
        ProducerPolicy.from_env("O_", {"O_LOOP__CONCURENCY__VALUE": "2"})


@pytest.mark.req("CE-42")
@pytest.mark.parametrize("order", [1, -1])
def test_a_variable_that_is_both_a_text_and_a_group_is_refused(order: int) -> None:
    names = {"O_LOOP": "x", "O_LOOP__LIMIT": "3"}
    with pytest.raises(ValueError, match=r"(?i)loop"):
        ProducerPolicy.from_env("O_", dict(list(names.items())[::order]))


def test_a_policy_file_of_another_kind_is_refused_with_the_kinds_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"policy\.yaml.*\.toml or \.json"):
        ConsumerPolicy.load(tmp_path / "policy.yaml")


OPTIONAL: list[tuple[type[BaseModel], str]] = [
    (RetryPolicy, "timeout"),
    (ConcurrencyPolicy, "max"),
    (BatchPolicy, "max_size"),
    (FetchPolicy, "connector_name"),
    (ProducerLoopPolicy, "timeout"),
    (ProducerLoopPolicy, "limit"),
    (ProducerLoopPolicy, "transaction_timeout"),
    (ConsumerLoopPolicy, "timeout"),
    (ConsumerLoopPolicy, "limit"),
    (ConsumerLoopPolicy, "transaction_timeout"),
]


@pytest.mark.parametrize("text", ["", "none", "null", "None", "NULL", "  ", " none "])
@pytest.mark.parametrize(("cls", "field"), OPTIONAL)
def test_an_empty_text_none_and_null_mean_none(cls: Any, field: str, text: str) -> None:
    assert getattr(cls(**{field: text}), field) is None


# ── round trips ─────────────────────────────────────────────────────────────────────────────────────────

seconds = st.floats(0, 1e6)
limits = st.none() | st.floats(0.001, 1e6)
counts = st.integers(1, 10_000)
retries = st.builds(
    RetryPolicy,
    max_attempts=counts,
    timeout=limits,
    backoff=seconds,
    backoff_multiplier=st.floats(1, 100),
    backoff_cap=seconds,
)
batches = st.builds(BatchPolicy, size=counts, interval=seconds)
slots = st.builds(ConcurrencyPolicy, value=counts)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
names = st.none() | st.text(min_size=1).filter(lambda name: name.strip().lower() not in ("", "none", "null"))
loops = {
    "batch": batches,
    "concurrency": slots,
    "timeout": limits,
    "limit": st.none() | st.integers(0, 10_000),
    "transaction_timeout": limits,
}
consumer_policies = st.builds(
    ConsumerPolicy,
    loop=st.builds(
        ConsumerLoopPolicy,
        **loops,
        streaming=st.booleans(),
        empty_queue=st.builds(
            EmptyQueuePolicy, backoff=seconds, backoff_multiplier=st.floats(1, 100), backoff_cap=seconds
        ),
        mode=st.sampled_from(["batch", "continuous"]),
    ),
    steps=st.builds(
        ConsumerSteps,
        fetch=st.builds(
            FetchPolicy,
            retry=retries,
            extra=st.dictionaries(st.text(), plain, max_size=3),
            connector_name=names,
        ),
        process=st.builds(ProcessPolicy, retry=retries),
        success=st.builds(SuccessPolicy, retry=retries),
        exception=st.builds(ExceptionPolicy, retry=retries),
    ),
)
producer_policies = st.builds(
    ProducerPolicy,
    loop=st.builds(ProducerLoopPolicy, **loops),
    steps=st.builds(
        ProducerSteps,
        produce=st.builds(ProducePolicy, retry=retries),
        success=st.builds(SuccessPolicy, retry=retries),
        exception=st.builds(ExceptionPolicy, retry=retries),
    ),
)


@pytest.mark.req("CE-41")
@given(policy=consumer_policies | producer_policies)
def test_any_policy_survives_json_dict_copy_and_pickle(policy: ConsumerPolicy | ProducerPolicy) -> None:
    cls = type(policy)
    assert cls.model_validate_json(policy.model_dump_json()) == policy
    assert cls.model_validate(json.loads(policy.model_dump_json())) == policy
    assert cls.model_validate(policy.model_dump()) == policy
    assert copy.deepcopy(policy) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


@given(policy=producer_policies)
def test_any_producer_policy_survives_the_environment(policy: ProducerPolicy) -> None:
    environ = {
        "O_" + "__".join(path).upper(): "" if value is None else str(value)
        for path, value in leaves(policy.model_dump())
    }
    assert ProducerPolicy.from_env("O_", environ) == policy


def test_engine_settings_load_from_the_environment_as_policies_do() -> None:
    environ = {
        "ONCEWARD_STUCK_GRACE": "1.5",
        "ONCEWARD_IO_GUARD": "warn",
        "ONCEWARD_TELEMETRY_FIELDS": '["payload.order_id"]',
    }
    assert EngineSettings.from_env("ONCEWARD_", environ) == EngineSettings(
        stuck_grace=1.5, io_guard="warn", telemetry_fields=("payload.order_id",)
    )

"""The policy of a consumer or producer of an app: what the code says, and what settings change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from onceward.errors import ConfigurationError
from onceward.task.mixins.policies import ConsumerPolicy, ProducerPolicy

P = TypeVar("P", ConsumerPolicy, ProducerPolicy)


BATCH = 100
THREADS, TASKS = 8, 64
"""How many messages of a consumer are in flight at once in a process, unless a policy or a setting says it."""


def default_loop(*, asynchronous: bool) -> dict[str, Any]:
    """The loop of a consumer of an app, where nothing else says it."""
    return {
        "mode": "continuous",
        "batch": {"size": BATCH},
        "concurrency": {"value": TASKS if asynchronous else THREADS},
    }


def policy_of(
    name: str,
    given: ConsumerPolicy | Mapping[str, Any] | None,
    changed: Mapping[str, Any] | None,
    concurrency: int | None,
    origin: str = "",
    *,
    asynchronous: bool = False,
) -> ConsumerPolicy:
    """What the code says, over the defaults of an app. `origin` is where `changed` comes from."""
    tree = parse_policy(ConsumerPolicy, given, name).model_dump(exclude_unset=True)
    # Where the code says something about a part, the rest of that part stays as it is without an app.
    tree["loop"] = {
        **default_loop(asynchronous=asynchronous),
        **tree.get("loop", {}),
    }
    if concurrency is not None:
        tree = _over(tree, {"loop": {"concurrency": {"value": concurrency}}})
    return parse_policy(ConsumerPolicy, _over(tree, changed or {}), name, origin)


def parse_policy(kind: type[P], given: P | Mapping[str, Any] | None, name: str, origin: str = "") -> P:
    from pydantic import ValidationError

    try:
        return kind.model_validate(given or {})
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        text = "; ".join(f"{'.'.join(map(str, each['loc']))}: {_describe(kind, each)}" for each in problems)
        raise ConfigurationError(f"{origin and f'{origin}: '}the policy of {name}: {text}") from None


def _describe(kind: type[Any], problem: Any) -> str:
    if problem["type"] != "extra_forbidden":
        return str(problem["msg"]).removeprefix("Value error, ")
    for part in problem["loc"][:-1]:
        kind = kind.model_fields[part].annotation
    return f"no such field; the fields are {', '.join(kind.model_fields)}"


def _over(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(tree)
    for name, value in changes.items():
        known = merged.get(name)
        merged[name] = (
            _over(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
        )
    return merged

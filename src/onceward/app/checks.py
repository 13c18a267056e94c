"""What can be declared in an app, and what cannot: checks of decorated functions, URLs and contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from onceward._functions import yields
from onceward._secrets import mask_url
from onceward.connectors.patience import check_patience
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.limits.limit import Limit

if TYPE_CHECKING:
    from onceward.app.consumer import Consumer
    from onceward.inbox import Contract


def address_of(url: str, name: str, *, sink: bool = False) -> Address:
    try:
        return Address(url, sink=sink)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from None


def name_of(function: Any) -> str:
    named = callable(function) and hasattr(function, "__name__")
    if not named or isinstance(function, (type, staticmethod)):  # @staticmethod goes around our decorator
        raise ConfigurationError(
            f"only a function (`def` or `async def`) can be decorated, not {type(function).__name__} {function!r}"
        )
    return str(function.__name__)


def share_an_inbox(one: Consumer, other: Consumer) -> bool:
    """Two sources of one function may share an inbox: an event that arrives from both is processed once."""
    if one.contract is None or other.contract is None or one.function == other.function:
        return False
    return one.contract.consumer_id == other.contract.consumer_id


def check_function(function: Any, name: str) -> None:
    name_of(function)
    if yields(function):
        raise ConfigurationError(
            f"{name} yields, so it is a producer, not a consumer; use @app.producer(sink)"
        )
    if not name.replace("-", "_").isidentifier():
        raise ConfigurationError(
            f"{name!r} is not a valid consumer name: settings and commands use it; pass one, as in name='charge'"
        )


def check_contract(contract: Any, name: str) -> None:
    if contract is None or contract is UNSET:
        return
    from onceward.inbox import Contract

    if not isinstance(contract, Contract):
        raise ConfigurationError(
            f"{name}: contract must be a Contract(consumer_id=…, …) or None, not {type(contract).__name__}"
        )


def check_limit(limit: Any, name: str, database: str | None) -> None:
    if limit is None:
        return
    if not isinstance(limit, Limit):
        raise ConfigurationError(
            f"{name}: limit must be a Limit, as in limit=Limit(rate='10/s', concurrency=5), not {limit!r}"
        )
    if database is None:
        raise ConfigurationError(
            f"{name} has a limit, which all processes count in the app's database; give it one: "
            "Onceward(…, database='sqlite:///shop.db'), or set ONCEWARD_DATABASE"
        )


def check_attempts(consumer: Consumer) -> None:
    """Refuse a rate of starts for a handler that is started again without one."""
    attempts = consumer.policy.steps.process.retry.max_attempts
    if consumer.limit is not None and consumer.limit.rate is not None and attempts > 1:
        raise ConfigurationError(
            f"{consumer.name} has the rate {consumer.limit.rate}, but its policy makes {attempts} attempts in a row "
            "at a message; leave steps.process.retry out, and use failures={…: retry('1s', '5s')} instead: each "
            "delivery waits for its start"
        )


def with_model(contract: Contract | None, model: Any, name: str) -> Contract | None:
    """Use the annotation as the contract's model, unless the contract names one."""
    from onceward.models import is_model

    if contract is None or not is_model(model):
        return contract
    if contract.model is not None and contract.model is not model:
        raise ConfigurationError(
            f"the contract of {name} converts payloads to {contract.model.__qualname__}, but the function takes "
            f"{model.__qualname__}; leave `model` out of the contract, or annotate the function with it"
        )
    import msgspec

    return msgspec.structs.replace(contract, model=model)


def check_delays(consumer: Consumer) -> None:
    """Refuse a source, or a rule, that buries a failing message sooner than the contract tolerates."""
    rules, contract = consumer.source.rules, consumer.contract
    if rules is None:
        return
    for condition, rule in consumer.failures.retries():
        times = rule.redelivery.times or 0
        if times >= rules.max_deliveries:
            raise ConfigurationError(
                f"{consumer.name} retries {condition} {times} times, but its source delivers a message at most "
                f"{rules.max_deliveries} times; add max_deliveries={times + 1} to the URL, or lower times"
            )
    if contract is None or contract.tolerates is None:
        return
    whose = contract.consumer_id, contract.tolerates
    remedy = "add or raise max_deliveries or redelivery_delay in its URL"
    check_patience(*whose, rules.shortest_delays(), f"its source {consumer.source}", remedy)
    for condition, rule in consumer.failures.retries():
        delays = rules.shortest_delays(rule.redelivery)
        check_patience(*whose, delays, f"its rule for {condition}", "give that more or longer delays")


def check_connections(consumer: Consumer, database: str) -> None:
    """Refuse a driver's connection where the session has another one, or none."""
    for parameter, kind in consumer.signature.guests.items():
        if kind.family == "orm":
            continue
        takes = f"{consumer.name} takes {parameter}: {kind.name}"
        if consumer.contract is not None and consumer.contract.mode == "effectful":
            raise ConfigurationError(
                f"{takes}, but its contract says mode='effectful', where no connection is held during an effect; take "
                "`session`, or a session of SQLAlchemy's ORM"
            )
        if (kind.family == "sqlite3") != database.startswith("sqlite"):
            raise ConfigurationError(
                f"{takes}, but the database of the app is {mask_url(database).partition(':')[0]}; take the "
                "connection of its driver, `session`, or a session of SQLAlchemy's ORM"
            )

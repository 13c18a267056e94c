"""The services of an app's consumer in a verification: fakes in place of what would call the outside world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onceward.app.services import Injection, Replaced, Service
from onceward.errors import ConfigurationError


def replace_services(
    consumer: str, injection: Injection, given: Mapping[Any, Any], reads: Sequence[Any]
) -> Replaced:
    """The services with their fakes. Raises ConfigurationError if a real one would call the outside world."""
    replaced = injection.services.replace(given)
    harmless = names_of(injection, reads)
    wanted = injection.parameters.values()
    real = [
        each
        for each in replaced.services.in_order(wanted, replaced.objects)
        if each.outside and each.name not in replaced.names | harmless
    ]
    if real:
        raise ConfigurationError(_refusal(consumer, real))
    return replaced


def outside_services(injection: Injection, replaced: Replaced, reads: Sequence[Any]) -> list[str]:
    """Those whose fakes stand for the outside world, so the handler may call them in an effect only."""
    taken = {each.name for each in injection.parameters.values() if each.outside}
    return sorted(taken & replaced.names - names_of(injection, reads))


def names_of(injection: Injection, keys: Sequence[Any]) -> set[str]:
    """The names of services that are given by name or type."""
    return {injection.services.find(each).name for each in keys}


def _refusal(consumer: str, real: list[Service]) -> str:
    names = " and ".join(str(each) for each in real)
    fakes = ", ".join(f"{_key(each)}: {_fake(each)}" for each in real)
    reads = ", ".join(repr(each.name) for each in real)
    return (
        f"{consumer} takes the real {names}, which would call the outside world; nothing was called. Replace it: "
        f"@app.consumer(…, verification=Verification(…, services={{{fakes}}})), or verify_consumer(…, services=…). If "
        f"it only reads there: reads=[{reads}]. If it calls nothing outside this process: @app.service(outside=False)"
    )


def _key(service: Service) -> str:
    return repr(service.name) if service.provides is None else service.provides.__name__


def _fake(service: Service) -> str:
    name = service.name.title().replace("_", "") if service.provides is None else service.provides.__name__
    return f"Fake{name}()"

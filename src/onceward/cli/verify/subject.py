"""Find what `onceward verify` is to prove by its name, or say what to write instead."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.app import Onceward

WHAT = "a function of an app, a class with a contract, or a handler of inbox.process with --contract"


class Subject(NamedTuple):
    code: Any
    """A task's class, or a handler."""
    contract: Any
    database: str | None
    """The database of its app, if it has one."""
    evidence: Any
    """`EvidenceSettings`: where its app, or the environment, has evidence."""


def subject_of(path: str, contract: str | None) -> Subject:
    """Import what a path names. `contract` is the path of a contract, for a handler without its own."""
    from onceward.app.build import evidence_settings, in_an_app, task_class
    from onceward.inbox.evidence.file import EvidenceSettings

    named = _import(path)
    found = in_an_app(named)
    code = named if found is None else task_class(found[1])
    promised = getattr(code, "contract", None) if contract is None else _contract(contract)
    if promised is None:
        _refuse(path, code, in_app=found is not None)
    if found is None:
        return Subject(code, promised, None, EvidenceSettings.from_environment())
    return Subject(code, promised, found[0].settings.database, evidence_settings(found[0]))


def subjects_of(path: str) -> tuple[Onceward, list[Subject]]:
    """The app that a path names, and all its consumers that have a contract."""
    from onceward.app.build import evidence_settings, task_class
    from onceward.app.lookup import load_app

    app = load_app(path)
    app.check()
    promised = [each for each in app.consumers.values() if each.contract is not None]
    if not promised:
        raise ConfigurationError(
            f"no consumer of {path} has a contract, so there is nothing to prove; write @app.consumer(…, "
            "contract=Contract(…))"
        )
    shared = app.settings.database, evidence_settings(app)
    return app, [Subject(task_class(each), each.contract, *shared) for each in promised]


def _import(path: str) -> Any:
    from onceward._imports import import_name
    from onceward.app import Onceward
    from onceward.app.consumer import Consumers

    module = path.partition(":")[0]
    try:
        found = import_name(path)
    except ConfigurationError as error:
        names = _names_in(module)
        known = f"; you can verify {', '.join(names)}" if names else ""
        raise ConfigurationError(f"{error}{known}") from None
    if isinstance(found, Onceward | Consumers):
        names = _names_in(module)
        if not names:
            raise ConfigurationError(f"{path} is an app; none of its consumers has a contract")
        raise ConfigurationError(
            f"{path} is an app; write onceward verify {path.removesuffix('.consumers')} --all, or verify one of "
            f"{', '.join(names)}"
        )
    return found


def _names_in(module: str) -> list[str]:
    """The paths of everything in a module that can be verified."""
    from onceward._imports import import_name
    from onceward.app import Onceward
    from onceward.task.base import BaseTask

    try:
        import_name(f"{module}:__name__")
    except ConfigurationError:
        return []
    there = vars(sys.modules[module])
    names: list[str] = []
    for name, value in there.items():
        if isinstance(value, Onceward):
            for consumer in value.consumers.values():
                function = consumer.function.__name__
                own = (
                    function
                    if there.get(function) is consumer.function
                    else f"{name}.consumers.{consumer.name}"
                )
                names += [own] if consumer.contract is not None else []
        elif isinstance(value, type) and issubclass(value, BaseTask) and getattr(value, "contract", None):
            names.append(name)
    return [f"{module}:{name}" for name in names]


def _contract(path: str) -> Any:
    from onceward._imports import import_name
    from onceward.inbox import Contract

    found = import_name(path)
    if not isinstance(found, Contract):
        raise ConfigurationError(f"--contract {path} is not a Contract but {type(found).__name__}")
    return found


def _refuse(path: str, code: Any, *, in_app: bool) -> NoReturn:
    from onceward.task.base import BaseTask

    if in_app:
        problem = (
            "has no contract, so there is nothing to prove; write @app.consumer(…, contract=Contract(…)), and "
            "give the function a parameter `session`"
        )
    elif isinstance(code, type) and issubclass(code, BaseTask):
        problem = "has no contract, so there is nothing to prove; write contract = Contract(…) in the class"
    elif callable(code):
        problem = "is not a consumer of an app; a handler of inbox.process needs --contract MODULE:NAME"
    else:
        problem = f"is {type(code).__name__}, not {WHAT}"
    raise ConfigurationError(f"{path} {problem}")

"""Services: objects that consumer functions take as parameters, and the factories that make them.

    @app.service
    def payments() -> Iterator[PaymentClient]:
        with PaymentClient() as client:
            yield client

A parameter gets a service by its name or by its type. A factory's own parameters are services, too.
"""

from __future__ import annotations

import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from onceward.app.injection.parameters import plain, taken_by_hint
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.app.injection.parameters import Taken

Per = Literal["process", "message"]
RESERVED = ("session", "inbox")
"""Names that mean something else to a consumer."""
YIELDED = (AsyncGenerator, AsyncIterator, Generator, Iterator)
"""What a function with `yield` is annotated with."""
PLAIN = ("builtins", "collections.abc", "typing")
"""Modules of types that payloads have. A service of such a type is found by its name only."""


class Service:
    """A factory. `name` is its function's, unless it replaces another one."""

    def __init__(
        self, function: Callable[..., Any], name: str, *, outside: bool = True, per: Per = "process"
    ) -> None:
        self.function = function
        self.name = name
        self.outside = outside
        """Whether its object may call the outside world."""
        self.per: Per = per
        """Whether one object serves all messages of a process, or each message gets its own."""
        inner = inspect.unwrap(function)
        self._yields = inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner)
        self.is_async = inspect.isasyncgenfunction(inner) or inspect.iscoroutinefunction(inner)

    @cached_property
    def hints(self) -> dict[str, Any]:
        function: Any = self.function
        annotated = getattr(function, "__init__", None) if isinstance(function, type) else function
        try:
            return get_type_hints(annotated, include_extras=True)
        except Exception as error:
            raise ConfigurationError(
                f"the annotations of service {self} cannot be read: {error}; import the annotated types at runtime, "
                "not only for type checkers"
            ) from error

    @cached_property
    def provides(self) -> type[Any] | None:
        """The class of its object; None if its return annotation does not name one."""
        if isinstance(self.function, type):
            return self.function
        made = self.hints.get("return")
        if self._yields:
            made = next(iter(get_args(made)), None)  # Iterator[X], AsyncGenerator[X, None]
        return made if isinstance(made, type) and made is not type(None) else None

    @property
    def promised(self) -> str:
        """What its return annotation says that it makes, for errors; empty if it may make None."""
        made = self.hints.get("return")
        if (
            not self._yields and get_origin(made) in YIELDED
        ):  # the `yield` was forgotten, or is in another function
            made = get_args(made)[0]
            return getattr(made, "__qualname__", str(made)) if made is not type(None) else ""
        return self.provides.__qualname__ if self.provides is not None else ""

    @property
    def where(self) -> str:
        """`file:line` of the factory."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"

    def __str__(self) -> str:
        return f"{self.name} ({self.where})" if self.where else self.name


class Replaced(NamedTuple):
    """The services of an app, some of them replaced by fakes."""

    services: Services
    """Factories, the fakes' among them."""
    objects: dict[str, Any]
    """Fakes that are objects."""
    names: frozenset[str]
    """All that are replaced."""


class Services(dict[str, Service]):
    """The services of an app by name."""

    def add(self, function: Callable[..., Any], *, outside: bool, per: Per = "process") -> None:
        name = getattr(function, "__name__", "")
        if isinstance(function, type) or not inspect.isroutine(function) or not name.isidentifier():
            raise ConfigurationError(
                f"@app.service goes above a function that returns or yields the service, not {function!r}"
            )
        service = Service(function, name, outside=outside, per=per)
        if per not in get_args(Per):
            raise ConfigurationError(
                f"service {service} has per={per!r}; write per='process' for one object in each process, or "
                "per='message' for one in each call of a handler"
            )
        if name in RESERVED:
            raise ConfigurationError(f"a service cannot be named {name!r}; rename the function {service}")
        if name in self:
            raise ConfigurationError(
                f"two services are named {name!r}: {self[name]} and {service}; rename one"
            )
        self[name] = service

    def add_lifespan(self, function: Callable[..., Any]) -> None:
        if isinstance(function, type) or not inspect.isroutine(function):
            raise ConfigurationError(f"@app.lifespan goes above a function with a yield, not {function!r}")
        name = f"{getattr(function, '__name__', 'lifespan')}()"  # which no parameter is called
        if name in self:
            raise ConfigurationError(f"two lifespans are named {function.__name__!r}; rename one")
        self[name] = Service(function, name)

    @property
    def lifespans(self) -> list[Service]:
        """What runs around all messages of a process."""
        return [each for name, each in self.items() if name.endswith("()")]

    def match(self, taker: str, name: str, hint: Any) -> Service | None:
        """The service that a parameter of `taker` gets; None if there is none. Raises if it is not clear which."""
        hint = plain(hint)
        named = self.get(name)
        if named is not None:
            if not _fits(named, hint):
                raise ConfigurationError(
                    f"{taker} takes {name}: {hint.__qualname__}, but the service {named} provides "
                    f"{_type_name(named)}; rename the parameter, or change one of the types"
                )
            return named
        found = self._of_type(hint)
        if len(found) > 1:
            raise ConfigurationError(
                f"{taker} takes {name}: {hint.__qualname__}, which {len(found)} services provide: "
                f"{', '.join(map(str, found))}; name the parameter like one of them"
            )
        return found[0] if found else None

    def _of_type(self, hint: Any) -> list[Service]:
        """Those of exactly this type, or else of a subclass."""
        if not isinstance(hint, type) or hint.__module__ in PLAIN:
            return []
        known = [each for each in self.values() if each not in self.lifespans]
        exact = [each for each in known if each.provides is hint]
        return exact or [each for each in known if each.provides and hint in each.provides.__mro__]

    def needs(self, service: Service) -> dict[str, Service]:
        """The services that a factory takes, by parameter."""
        found: dict[str, Service] = {}
        for each in inspect.signature(service.function).parameters.values():
            if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) or each.name in self.of_message(service):
                continue
            needed = self.match(f"service {service.name}", each.name, service.hints.get(each.name, Any))
            if needed is not None and each.kind is not each.POSITIONAL_ONLY:
                if needed.per == "message" and service.per == "process":
                    raise ConfigurationError(
                        f"service {service} is made once in a process, but takes {each.name}, which service {needed} "
                        "makes for each message; add per='message' to it, too"
                    )
                found[each.name] = needed
            elif each.default is each.empty:
                raise ConfigurationError(
                    f"service {service} takes {each.name}, but a factory takes other services only, by name or by type"
                    f"{'' if service.per == 'process' else ', a Transaction and sessions'}; {self.known()}"
                )
        return found

    def of_message(self, service: Service) -> dict[str, Taken]:
        """The parameters of a factory that get the transaction or a session of the message."""
        if service.per == "process":
            return {}
        names = inspect.signature(service.function).parameters
        found = {
            name: taken_by_hint(name, service.hints.get(name, Any)) for name in names if name not in self
        }
        return {name: taken for name, taken in found.items() if taken is not None}

    def in_order(self, wanted: Iterable[Service], given: Collection[str] = ()) -> list[Service]:
        """These services and all that they need, in the order to open them, without those in `given`."""
        found: dict[str, Service] = {}
        path: list[str] = []

        def visit(service: Service) -> None:
            if service.name in found or service.name in given:
                return
            if service.name in path:
                circle = " → ".join([*path[path.index(service.name) :], service.name])
                raise ConfigurationError(
                    f"services need each other: {circle}; remove one of these parameters"
                )
            path.append(service.name)
            for each in self.needs(service).values():
                visit(each)
            path.pop()
            found[service.name] = service

        for each in wanted:
            visit(self[each.name])
        return list(found.values())

    def need_a_loop(self, wanted: Iterable[Service], given: Collection[str] = ()) -> list[Service]:
        """Those of the services, and of what they need, that only asyncio can open."""
        return [each for each in self.in_order(wanted, given) if each.is_async]

    def find(self, key: str | type[Any]) -> Service:
        """The service of this name or type. Raises ConfigurationError if there is none, or more than one."""
        found = [self[key]] if isinstance(key, str) and key in self else self._of_type(key)
        if len(found) == 1:
            return found[0]
        name = key if isinstance(key, str) else getattr(key, "__qualname__", repr(key))
        if found:
            raise ConfigurationError(
                f"{len(found)} services provide {name}: {', '.join(map(str, found))}; use the name of one"
            )
        raise ConfigurationError(f"there is no service {name}; {self.known()}")

    def replace(self, fakes: Mapping[Any, Any]) -> Replaced:
        """Replace services, by name or type. A function or a class is a factory of the fake, anything else the fake."""
        if not isinstance(fakes, Mapping):
            raise ConfigurationError(
                "services must be a dict of fakes by type or name, as in {Client: FakeClient()}, not "
                f"{type(fakes).__name__}"
            )
        services, objects, names = Services(self), {}, set()
        for key, fake in fakes.items():
            real = self.find(key)
            names.add(real.name)
            if inspect.isroutine(fake) or isinstance(fake, type):
                services[real.name] = Service(fake, real.name, outside=real.outside)
            else:
                objects[real.name] = fake
        return Replaced(services, objects, frozenset(names))

    def known(self) -> str:
        known = [each for each in self.values() if each not in self.lifespans]
        if not known:
            return "the app has no services; declare one above with @app.service"
        return f"the services are {', '.join(f'{each.name}: {_type_name(each)}' for each in known)}"


class Injection(NamedTuple):
    """The services that a consumer function takes."""

    services: Services
    parameters: dict[str, Service]

    def object(self, service: Service, given: Mapping[str, Any], taker: str) -> Any:
        """The object of a service, from those that are open."""
        try:
            return given[service.name]
        except KeyError:
            raise ConfigurationError(
                f"{taker} was built without its service {service.name}; open it with open_task(app, consumer)"
            ) from None


def _fits(service: Service, hint: Any) -> bool:
    """Whether a service may go to a parameter of its name. Protocols and unions are left to type checkers."""
    if not isinstance(hint, type) or service.provides is None or getattr(hint, "_is_protocol", False):
        return True
    return hint in (Any, object) or hint in service.provides.__mro__


def _type_name(service: Service) -> str:
    return "without a type" if service.provides is None else service.provides.__qualname__

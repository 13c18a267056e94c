"""Which arguments a function takes, and how a transaction fills them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import msgspec

from onceward._functions import is_async
from onceward.app.injection.parameters import check_guests, taken_by_hint
from onceward.app.injection.scope import MessageScope
from onceward.app.services import Injection, Service, Services
from onceward.errors import ConfigurationError
from onceward.models import (
    contains_pydantic,
    convert_payload,
    ignores_pydantic,
    is_model,
    is_typed_dict,
    validator,
)
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.db.guests import Kind

ANYTHING = (Any, object, inspect.Parameter.empty)
"""Annotations that leave the payload as it is."""


class Signature:
    """The parameters of a consumer: `def charge(order: Order, payments: Payments, session, transaction: Transaction)`.

    A parameter annotated `Transaction` gets the transaction, one named `session` the database session of the contract,
    one annotated with a session of SQLAlchemy's ORM, or a driver's connection, that one on the same transaction, one
    that has the name or type of a service gets the service, and the remaining one the payload, converted to its
    annotated type.
    """

    def __init__(
        self, function: Callable[..., Any], *, session: bool, services: Services | None = None
    ) -> None:
        self.name = function.__name__
        self.injection = Injection(Services() if services is None else services, {})
        hints = _hints(function)
        self._transaction: str | None = None
        self._session: str | None = None
        self.guests: dict[str, Kind] = {}
        """Parameters that use the session's transaction through a library."""
        rest = [
            each for each in inspect.signature(function).parameters.values() if not self._takes(each, hints)
        ]
        self._payload = self._payload_among(rest)
        self.scope = MessageScope(self.name, self.injection, self.guests)
        self._check(session)
        check_guests(self.name, self.guests, contract=session, asynchronous=is_async(function))
        self._check_decorators(function)
        hint = hints.get(self._payload or "", Any)
        of_one = batched(hint) if session else None
        self.takes_batches = of_one is not None
        self.scope.check(contract=session, asynchronous=is_async(function), batches=self.takes_batches)
        """Whether the payload's parameter gets a list, with the payloads or transactions of several events."""
        self._of_transactions = of_one is Transaction
        hint = hint if of_one is None else of_one
        self.model: Any = None if hint in ANYTHING or self._of_transactions else hint
        self._fit = None if self.model is None else Fit(self.model, self.name)

    @property
    def transaction(self) -> str | None:
        """The parameter that gets the transaction."""
        return self._transaction

    def _takes(self, parameter: inspect.Parameter, hints: dict[str, Any]) -> bool:
        """Whether the parameter is the transaction, the session or a service."""
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            raise ConfigurationError(
                f"{self.name} takes {stars}{parameter.name}; name its parameters instead"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigurationError(
                f"{self.name} takes {parameter.name} by position only, but arguments are passed by name; remove the `/`"
            )
        taken = None
        if parameter.name not in self.injection.services:
            taken = taken_by_hint(parameter.name, hints.get(parameter.name, Any))
        if taken == "transaction":
            if self._transaction is not None:
                raise ConfigurationError(
                    f"{self.name} takes the transaction twice: {self._transaction}, {parameter.name}; annotate only "
                    "one with Transaction"
                )
            self._transaction = parameter.name
        elif taken == "session":
            if self._session is not None:
                raise ConfigurationError(
                    f"{self.name} takes the inbox's session twice: {self._session}, {parameter.name}; remove one"
                )
            self._session = parameter.name
        elif taken is not None:
            self.guests[parameter.name] = taken
        elif service := self._service(parameter.name, hints):
            self.injection.parameters[parameter.name] = service
        else:
            return False
        return True

    def _service(self, parameter: str, hints: dict[str, Any]) -> Service | None:
        return self.injection.services.match(self.name, parameter, hints.get(parameter, Any))

    def _payload_among(self, rest: list[inspect.Parameter]) -> str | None:
        """The parameter without a default; those with one may serve other callers of the function."""
        needed = [each.name for each in rest if each.default is each.empty]
        if len(needed) > 1:
            raise ConfigurationError(
                f"{self.name} has {len(needed)} parameters for a payload: {', '.join(needed)}; a consumer takes one, "
                "and optionally `session`, a `Transaction` and services, by name or by type; "
                f"{self.injection.services.known()}"
            )
        return next(iter(needed or [each.name for each in rest]), None)

    def _check(self, session: bool) -> None:
        if session and self._session is None and not self.scope.kinds:
            raise ConfigurationError(
                f"{self.name} has a contract, so it needs a parameter `session`: what it writes through the session is "
                "committed together with the record that the event is processed"
            )
        if self._session is not None and not session:
            raise ConfigurationError(
                f"{self.name} has a parameter `{self._session}` but no contract; pass contract=Contract(…), and give "
                "the app a database"
            )

    def _check_decorators(self, function: Callable[..., Any]) -> None:
        """The parameters are those of the innermost function; every decorator has to pass them on."""
        names = [each for each in (self._payload, self._transaction, self._session) if each is not None]
        names += [*self.injection.parameters, *self.guests]
        try:
            inspect.signature(function, follow_wrapped=False).bind(**dict.fromkeys(names))
        except TypeError as error:
            raise ConfigurationError(
                f"{self.name} cannot be called with {', '.join(names)}: {error}; arguments are passed by name, and its "
                "decorator must pass them on, as with `def wrapper(*args, **kwargs)`"
            ) from None

    def method(self, function: Callable[..., Any], *, asynchronous: bool) -> Callable[..., Any]:
        """Return a `process_transaction` that calls the function."""
        opens = bool(self.scope)

        arguments = self.arguments

        def process(_: Any, transaction: Transaction, /, session: Any = None, **__: Any) -> Any:
            return function(**arguments(transaction, session))

        def process_with(task: Any, transaction: Transaction, /, *session: Any, **__: Any) -> Any:
            given = self.arguments(transaction, *session)
            if not opens:
                return function(**given, **self.scope.of_process(task.services))
            with self.scope.open(task.services, transaction, *session) as more:
                return function(**given, **more)

        async def process_with_async(task: Any, transaction: Transaction, /, *session: Any, **__: Any) -> Any:
            given = self.arguments(transaction, *session)
            if not opens:
                return await function(**given, **self.scope.of_process(task.services))
            async with self.scope.open_async(task.services, transaction, *session) as more:
                return await function(**given, **more)

        made: Any = process  # in asyncio, what it returns is awaited
        if self.injection.parameters or self.guests:
            made = process_with_async if asynchronous else process_with
        elif self._takes_one(function):
            made = self._method_of_one(function)
        made.__wrapped__ = function
        made.__qualname__ = function.__qualname__
        return made  # type: ignore[no-any-return]

    def _takes_one(self, function: Callable[..., Any]) -> bool:
        """Whether the payload or the transaction is all that it takes, and by position is the same as by name: in a
        plain function, which has no decorator that might tell the difference."""
        names = [each for each in (self._payload, self._transaction, self._session) if each is not None]
        if type(function) is not FunctionType or hasattr(function, "__wrapped__") or len(names) != 1:
            return False
        taken = inspect.signature(function).parameters[names[0]]
        return taken.kind is taken.POSITIONAL_OR_KEYWORD and function.__code__.co_varnames[0] == names[0]

    def _method_of_one(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """As `process` of `method`, without a dict of arguments for each message."""
        fit = self._fit

        def process_transaction(_: Any, transaction: Transaction, /, session: Any = None, **__: Any) -> Any:
            return function(transaction)

        def process_payload(_: Any, transaction: Transaction, /, session: Any = None, **__: Any) -> Any:
            return function(transaction.payload)

        def process_fitted(_: Any, transaction: Transaction, /, session: Any = None, **__: Any) -> Any:
            return function(fit(transaction.payload))  # type: ignore[misc]

        if self._transaction is not None:
            return process_transaction
        return process_payload if fit is None else process_fitted

    def arguments(self, transaction: Any, session: Any = None) -> dict[str, Any]:
        """The arguments by name. Raises TransactionException (business) if a payload does not fit."""
        given: dict[str, Any] = {}
        if self._payload is not None and self.takes_batches:
            given[self._payload] = [self._of(each) for each in transaction]
        elif self._payload is not None:
            given[self._payload] = self._of(transaction)
        if self._transaction is not None:
            given[self._transaction] = transaction
        if self._session is not None:
            given[self._session] = session
        return given

    def _of(self, transaction: Transaction) -> Any:
        if self._of_transactions:
            return transaction
        return transaction.payload if self._fit is None else self._fit(transaction.payload)


def batched(hint: Any) -> Any:
    """What `list[X]` is a batch of: a model, dict or Transaction; None if it is not a batch, but a payload."""
    if get_origin(hint) is not list or len(get_args(hint)) != 1:
        return None
    (of,) = get_args(hint)
    return of if of is Transaction or of is dict or get_origin(of) is dict or is_model(of) else None


class Fit:
    """Converts payloads to the annotated type of a function's parameter."""

    def __init__(self, model: Any, function: str) -> None:
        self._model = model
        self._function = function
        plain = isinstance(model, type) and get_origin(model) is None
        self._name = model.__qualname__ if plain else str(model)
        self._class = model if plain and not is_typed_dict(model) else None
        try:
            self._validate = _validator(model)
        except Exception as error:
            raise ConfigurationError(
                f"{function} takes {self._name}, which a payload cannot be converted to; annotate it with a pydantic "
                "model, a msgspec Struct, a dataclass, a TypedDict, or a plain type such as dict or list[str] "
                f"({str(error).partition(chr(10))[0]})"
            ) from error

    def __call__(self, payload: Any) -> Any:
        if self._class is not None and type(payload) is self._class:
            return payload  # converted already, by an inbox or the sender
        value, problem, cause = convert_payload(self._model, payload, self._validate)
        if problem is not None:
            raise TransactionException(
                f"the payload does not fit {self._name} of {self._function}: {problem}",
                category=ExceptionCategory.BUSINESS,
            ) from cause
        return value


def _validator(model: Any) -> Callable[[Any], Any]:
    """Fail for an impossible type when the function is decorated, not when the first message arrives."""
    if ignores_pydantic(model):
        raise TypeError("a msgspec Struct does not check constraints of pydantic; use msgspec.Meta")
    if not contains_pydantic(model):
        msgspec.json.schema(model)  # raises for exactly the types that msgspec cannot make
    return validator(model)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception as error:
        raise ConfigurationError(
            f"the annotations of {function.__name__} cannot be read: {error}; import the annotated types at "
            "runtime where the consumer is defined, not only for type checkers"
        ) from error

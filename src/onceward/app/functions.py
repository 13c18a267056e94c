"""What a function asks for, by its parameters, and how a transaction is put into them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from onceward.fitting import fitted
from onceward.task.exceptions import ConfigurationError, ExceptionCategory, TransactionException
from onceward.transaction import Transaction


class Signature:
    """`def charge(order: Order, session, transaction: Transaction)`: the payload, and what else it takes.

    A parameter annotated `Transaction` gets the transaction, one named `session` the database session of the contract,
    and the one that is left the payload, in the type that it is annotated with.
    """

    def __init__(self, function: Callable[..., Any], *, session: bool) -> None:
        self.name = function.__name__
        hints = _hints(function)
        self._payload: str | None = None
        self._transaction: str | None = None
        self._session: str | None = None
        self.model: Any = None
        for parameter in inspect.signature(function).parameters.values():
            self._take(parameter, hints.get(parameter.name))
        self._check(session)

    def _check(self, session: bool) -> None:
        if session and self._session is None:
            raise ConfigurationError(
                f"{self.name} has a contract, so that it needs a parameter `session`: what it writes through it is "
                "committed together with the record that the event is done"
            )
        if self._session is not None and not session:
            raise ConfigurationError(
                f"{self.name} has a parameter `session`, but no contract; give it contract=Contract(…), and the app a "
                "database"
            )

    def _take(self, parameter: inspect.Parameter, hint: Any) -> None:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigurationError(f"{self.name} takes *{parameter.name}; name what it takes")
        if hint is Transaction:
            self._transaction = parameter.name
        elif parameter.name == "session":
            self._session = parameter.name
        elif self._payload is None:
            self._payload = parameter.name
            self.model = None if hint in (Any, None, dict, object) else hint
        elif parameter.default is parameter.empty:
            raise ConfigurationError(
                f"{self.name} has two parameters for a payload, {self._payload} and {parameter.name}; a consumer takes "
                "one, and `session` and a `Transaction` if it wants"
            )

    def arguments(self, transaction: Transaction, session: Any = None) -> dict[str, Any]:
        """By name. A payload that does not fit is refused for good."""
        given: dict[str, Any] = {}
        if self._payload is not None:
            given[self._payload] = self._fitted(transaction)
        if self._transaction is not None:
            given[self._transaction] = transaction
        if self._session is not None:
            given[self._session] = session
        return given

    def _fitted(self, transaction: Transaction) -> Any:
        if self.model is None or _is_one(transaction.payload, self.model):
            return transaction.payload  # an inbox has made it already
        value, problem, cause = fitted(self.model, transaction.payload)
        if problem is not None:
            model = getattr(self.model, "__qualname__", self.model)
            raise TransactionException(
                f"the payload does not fit {model} of {self.name}: {problem}",
                category=ExceptionCategory.BUSINESS,
            ) from cause
        return value


def _is_one(payload: Any, model: Any) -> bool:
    return isinstance(model, type) and isinstance(payload, model)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except NameError as error:
        raise ConfigurationError(
            f"the annotations of {function.__name__} cannot be read: {error}; what a consumer is annotated with must "
            "be importable where it is defined"
        ) from error

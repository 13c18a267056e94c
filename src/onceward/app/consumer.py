"""A decorated consumer function, and all of an app."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType

from onceward._functions import is_async
from onceward.app.checks import address_of, check_attempts, check_delays, with_model
from onceward.app.send.functions import SendsToSource
from onceward.app.services import Services
from onceward.app.signature import Signature
from onceward.errors import ConfigurationError
from onceward.failures.rules import RuleBook
from onceward.failures.states import Identity
from onceward.limits.limit import KeyReader, Limit
from onceward.order.rule import OrderRule, check_order
from onceward.outbox import Outbox
from onceward.task.mixins.policies import ConsumerPolicy

if TYPE_CHECKING:
    from onceward.app.app import Onceward
    from onceward.inbox import Contract
    from onceward.inbox.commits.group import Commit


class Consumer(SendsToSource):
    """A decorated consumer function with its source, contract and policy."""

    contract: Contract | None = None
    verification: Any = None
    outbox: Outbox | None = None
    """What its handler publishes through."""
    commit: Commit | None = None
    """How its events are committed; None if the database decides."""
    limit: Limit | None = None
    """How many start in a time or run at once, in all processes; None if nothing limits them."""
    limit_keys: KeyReader | None = None
    order: OrderRule | None = None
    """How it keeps order; None if it does not."""

    def __init__(
        self,
        function: Callable[..., Any],
        source: str,
        contract: Contract | UnsetType | None,
        policy: ConsumerPolicy,
        name: str,
        verification: Any = None,
        services: Services | None = None,
        app: Onceward | None = None,
        commit: Commit | None = None,
        failures: RuleBook | None = None,
        limit: Limit | None = None,
        order: tuple[Any, Any, Any] | None = None,
    ) -> None:
        self.app = app
        """Its app, which is found among all apps for as long as one of its consumers is known."""
        self.says_contract = contract is not UNSET
        """Whether the code says which contract it has, even if it says None. Production asks for that."""
        contract = None if contract is UNSET else contract
        self.function = function
        self.name = name
        self.signature = Signature(function, session=contract is not None, services=services)
        self.source = address_of(source, name)
        self.contract = with_model(contract, self.signature.model, name)
        self.policy = policy
        self.commit = commit
        self.verification = verification
        self.asynchronous = is_async(function)
        self.takes_batches = self.signature.takes_batches
        self._check_batches(commit)
        self.failures = RuleBook() if failures is None else failures
        """Its failure rules, with those of its app."""
        self.limit = limit
        self.limit_keys = None if limit is None else KeyReader(limit, name, self.signature.model)
        if limit is not None and commit is None and not self.takes_batches and self.contract is not None:
            self.commit = "each"  # a slot is free when the commit is made, not when that of others is
        self.order = None
        if order is not None:
            self.order = check_order(*order, self.contract, self.source, name, self.signature.model)
        self._check_services()
        check_delays(self)
        check_attempts(self)

    @property
    def identity(self) -> Identity:
        """The id in its contract, or its name if it has none; and its name."""
        return self.name if self.contract is None else self.contract.consumer_id, self.name

    def _check_batches(self, commit: str | None) -> None:
        if not self.takes_batches or self.contract is None:
            return
        if self.contract.mode == "effectful":
            raise ConfigurationError(
                f"{self.name} takes a list of events, but its contract says mode='effectful', and an outside call "
                "belongs to one event. Take one event, or set mode='transactional' and write only through the session"
            )
        if commit is not None:
            raise ConfigurationError(
                f"{self.name} takes a list of events, so each call has one commit; leave commit={commit!r} out, or "
                "take one event"
            )
        if self.signature.transaction is not None:
            raise ConfigurationError(
                f"{self.name} takes a list of events and one Transaction; take list[Transaction], which has the "
                "payloads"
            )

    def _check_services(self) -> None:
        """Refuse what cannot be opened: services that need each other, or an event loop for a `def`."""
        services, taken = self.signature.injection
        for parameter, service in taken.items():
            needs_loop = services.need_a_loop([service])
            if needs_loop and not self.asynchronous:
                through = "" if service in needs_loop else f", which needs {needs_loop[0]}"
                raise ConfigurationError(
                    f"{self.name} takes {parameter}, but it runs in threads and the service {service}{through} is "
                    "`async def`; make the consumer `async def`, or the factory a plain `def`"
                )


class Consumers(dict[str, Consumer]):
    """Consumers by name, and as attributes so a command can name one: `shop:app.consumers.charge`."""

    def __getattr__(self, name: str) -> Consumer:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

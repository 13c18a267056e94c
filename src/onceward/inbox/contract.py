"""What a consumer promises: declared once, and checked before the consumer runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, get_args

import msgspec

from onceward._functions import check_function, is_async
from onceward.durations import parse_seconds
from onceward.errors import ConfigurationError
from onceward.inbox.event import LONGEST_TYPE, UNFIT
from onceward.inbox.purge.retention import SHORTEST_DEAD_LETTER_DAYS, Retention, check_retention
from onceward.models import forbidding, is_model

Mode = Literal["transactional", "effectful"]
Sequencing = Literal["none", "latest-wins", "strict"]
Upcaster = Callable[[Any], Any]

EVERY_TYPE = "*"
"""As the only event type of a contract: every type."""

LONGEST_NAME = LONGEST_TYPE
"""Characters of a consumer's id, a team's name or an event type. They are keys and metric labels."""

_UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")


class Upcasters(dict[int, Upcaster]):
    """A checked, read-only chain of upcasters. Unlike `MappingProxyType`, it can be pickled."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a contract's upcasters are read-only; create a new contract")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[Self], tuple[dict[int, Upcaster]]]:
        return type(self), (dict(self),)


class _Complete(msgspec.StructMeta):
    """Names all fields that are missing or unknown, at once."""

    if not TYPE_CHECKING:  # type checkers know the fields

        def __call__(cls, *args: Any, **given: Any) -> Any:
            fields = msgspec.structs.fields(cls)
            missing = [each.name for each in fields if each.required and each.name not in given]
            unknown = [name for name in given if name not in cls.__struct_fields__]
            problems = [f"needs {', '.join(missing)}"] if missing else []
            problems += [f"has no field {', '.join(unknown)}"] if unknown else []
            problems += ["takes its fields by name"] if args else []
            if problems:
                named = f" of {given['consumer_id']!r:.60}" if "consumer_id" in given else ""
                example = ", ".join(f"{each.name}=…" for each in fields if each.required)
                raise ConfigurationError(
                    f"the contract{named} {', and it '.join(problems)}; write Contract({example}, …)"
                )
            return super().__call__(**given)


class Contract(msgspec.Struct, frozen=True, kw_only=True, metaclass=_Complete):
    """A consumer's contract. Raises `ConfigurationError` if it cannot be kept."""

    consumer_id: str
    """Part of the identity of every dedup record: with another id, every event is new again."""
    event_types: Sequence[str]
    """The types it accepts, stored as a tuple; `("*",)` means every type. There are no other patterns."""
    owner_team: str
    """The team to contact when it fails."""
    idempotency_mechanism: str
    """How it handles duplicates, in words."""
    retention: Retention = "standard"
    """The class of its data, which sets the minimum number of days to keep dedup records."""
    dedup_days: float | None = None
    """Days to keep dedup records. None: the minimum."""
    source_days: float = 7
    """Days after which the source cannot deliver an event again."""
    dead_letter_days: float = SHORTEST_DEAD_LETTER_DAYS
    """Days in which a dead letter may be redriven."""
    replay_days: float = 0
    """How many days back events may be replayed."""
    mode: Mode = "transactional"
    """`transactional`: all effects are writes in the inbox's transaction. `effectful`: the handler also calls other
    systems, which happens at least once, with a stable key."""
    no_effects: Sequence[str] = ()
    """Event types that change nothing, such as a ping, stored as a tuple; `("*",)` means all of them. `onceward verify`
    fails for any other type whose samples neither write a row nor have an effect."""
    schema_version: int = 1
    """The version of the payload that the handler understands."""
    upcasters: Mapping[int, Upcaster] = msgspec.field(default_factory=Upcasters)
    """Under n: the function that converts a payload from version n to n + 1."""
    model: type | None = None
    """The type of the handler's payload: a pydantic model, a msgspec Struct, a dataclass or a TypedDict."""
    sequencing: Sequencing = "none"
    """Order of the events of one aggregate. `latest-wins`: an event older than the last one is dropped. `strict`: an
    event that arrives too early waits."""
    first_sequence: int = 1
    """The number of an aggregate's first event (`strict`)."""
    gap_timeout: float = 300
    """Seconds that an event waits for its predecessors."""
    poison_after: int = 3
    """Starts without an end after which an event is set aside."""
    lease: float = 60
    """Seconds that a claim keeps other workers away."""
    tolerates: Any = None
    """How long a message may keep failing, at least, before it becomes a dead letter: "10m", "2h", a timedelta or a
    number of seconds, stored as seconds. A source, or a failure rule, that buries sooner is refused."""

    def __post_init__(self) -> None:
        _check_id(self, "consumer_id", self.consumer_id)
        msgspec.structs.force_setattr(self, "event_types", _parse_types(self))
        msgspec.structs.force_setattr(self, "no_effects", _parse_no_effects(self))
        _check_id(self, "owner_team", self.owner_team)
        _check_mechanism(self)
        _check_choice(self, "retention", Retention)
        _check_choice(self, "mode", Mode)
        _check_choice(self, "sequencing", Sequencing)
        _check_times(self)
        if self.tolerates is not None:
            name = f"consumer {_short_repr(self.consumer_id)}: tolerates"
            msgspec.structs.force_setattr(self, "tolerates", parse_seconds(self.tolerates, name))
        _check_integer(self, "schema_version")
        _check_integer(self, "poison_after")
        _check_sequencing(self)
        msgspec.structs.force_setattr(self, "upcasters", _parse_upcasters(self))
        _check_model(self)
        check_retention(self)

    @property
    def oldest_version(self) -> int:
        """The oldest schema version from which the upcasters lead to the current one."""
        return min(self.upcasters, default=self.schema_version)

    def accepts(self, event_type: str) -> bool:
        return event_type in self.event_types or self.event_types[0] == EVERY_TYPE

    def has_effects(self, event_type: str) -> bool:
        """Whether events of this type are to write something or have an effect."""
        return event_type not in self.no_effects and EVERY_TYPE not in self.no_effects

    def as_row(self) -> dict[str, Any]:
        """Return all fields as JSON-compatible values; code is named as `module:qualname`."""
        row = {name: getattr(self, name) for name in self.__struct_fields__}
        row["event_types"] = list(self.event_types)
        row["no_effects"] = list(self.no_effects)
        row["upcasters"] = {str(version): _name_of(upcaster) for version, upcaster in self.upcasters.items()}
        row["model"] = None if self.model is None else _name_of(self.model)
        return row


def _name_of(code: Any) -> str:
    # A partial or an object with __call__ has no name of its own, but its class has.
    named = code if hasattr(code, "__qualname__") else type(code)
    return f"{named.__module__}:{named.__qualname__}"


def _refuse(contract: Contract, problem: str) -> NoReturn:
    raise ConfigurationError(f"consumer {_short_repr(contract.consumer_id)}: {problem}")


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


# ───────────────────────────── strings ─────────────────────────────


def _check_id(contract: Contract, field: str, value: Any) -> None:
    if not isinstance(value, str):
        _refuse(contract, f"{field} must be a string, not {type(value).__name__}")
    if not value.strip():
        _refuse(contract, f"{field} is empty; use a name that stays the same across releases")
    if value != value.strip():
        _refuse(
            contract,
            f"{field} {_short_repr(value)} has spaces around it, which make it another id; remove them",
        )
    if len(value) > LONGEST_NAME:
        _refuse(contract, f"{field} has {len(value)} characters; shorten it to at most {LONGEST_NAME}")
    if UNFIT.search(value):
        _refuse(contract, f"{field} {_short_repr(value)} has control characters; use plain text")


def _check_mechanism(contract: Contract) -> None:
    text: Any = contract.idempotency_mechanism
    if not isinstance(text, str) or not text.strip():
        _refuse(
            contract,
            "idempotency_mechanism must say in words how duplicates are handled, for example "
            "'dedup record and invoice row in one transaction'",
        )
    if _UNSTORABLE.search(text):
        _refuse(contract, "idempotency_mechanism has characters that a database cannot store; use plain text")


def _parse_types(contract: Contract) -> tuple[str, ...]:
    types = _as_types(contract, "event_types")
    if not types:
        _refuse(
            contract, "event_types is empty, so it would never run; list its types, or ['*'] for every type"
        )
    for event_type in types:
        _check_id(contract, "an event type", event_type)
    _check_together(contract, types)
    return types


def _parse_no_effects(contract: Contract) -> tuple[str, ...]:
    types = _as_types(contract, "no_effects")
    for event_type in types:
        if event_type != EVERY_TYPE and not contract.accepts(event_type):
            _refuse(
                contract,
                f"no_effects names {_short_repr(event_type)}, which is not among its event_types; correct the name, or "
                "remove it",
            )
    return types


def _as_types(contract: Contract, field: str) -> tuple[str, ...]:
    given: Any = getattr(contract, field)
    if isinstance(given, str):
        _refuse(
            contract,
            f"{field} must be a list of types, not a string; write {field}=[{_short_repr(given)}]",
        )
    if not isinstance(given, Sequence | frozenset | set):
        _refuse(contract, f"{field} must be a list of types, not {type(given).__name__}")
    return tuple(given) if isinstance(given, Sequence) else tuple(sorted(given))


def _check_together(contract: Contract, types: tuple[str, ...]) -> None:
    twice = sorted({event_type for event_type in types if types.count(event_type) > 1})
    if twice:
        _refuse(
            contract, f"event_types lists {', '.join(map(_short_repr, twice))} more than once; list it once"
        )
    if EVERY_TYPE in types and len(types) > 1:
        _refuse(
            contract,
            "event_types has '*', which means every type, together with others; remove one or the other",
        )
    patterns = [event_type for event_type in types if "*" in event_type and event_type != EVERY_TYPE]
    if patterns:
        _refuse(
            contract,
            f"event_types has {_short_repr(patterns[0])}, but the only pattern is '*' alone; list each type, or use "
            "['*']",
        )


def _check_sequencing(contract: Contract) -> None:
    first: Any = contract.first_sequence
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        _refuse(contract, f"first_sequence must be an integer, 0 or more, not {_short_repr(first)}")
    if contract.mode == "effectful" and contract.sequencing != "none":
        _refuse(
            contract,
            f"sequencing={contract.sequencing!r} needs mode='transactional': an outside call cannot be undone when "
            "a later event turns out to have overtaken it",
        )


def _check_choice(contract: Contract, field: str, choices: Any) -> None:
    value, allowed = getattr(contract, field), get_args(choices)
    if value not in allowed:
        _refuse(contract, f"{field} must be one of {', '.join(allowed)}, not {_short_repr(value)}")


# ───────────────────────────── numbers ─────────────────────────────


def _check_times(contract: Contract) -> None:
    for field in ("source_days", "dead_letter_days", "replay_days"):
        _check_span(contract, field, "days", positive=False)
    if contract.dedup_days is not None:
        _check_span(contract, "dedup_days", "days", positive=True)
    _check_span(contract, "lease", "seconds", positive=True)
    # Without a timeout, one lost event would block its aggregate forever.
    _check_span(contract, "gap_timeout", "seconds", positive=contract.sequencing != "none")
    if contract.dead_letter_days < SHORTEST_DEAD_LETTER_DAYS:
        _refuse(
            contract,
            f"dead_letter_days is {_short_repr(contract.dead_letter_days)}, but dead letters are kept for at least "
            f"{SHORTEST_DEAD_LETTER_DAYS} days; set {SHORTEST_DEAD_LETTER_DAYS} or more, or leave it out",
        )


def _check_span(contract: Contract, field: str, unit: str, *, positive: bool) -> None:
    value = getattr(contract, field)
    if type(value) in (int, float) and (0 < value < math.inf or (value == 0 and not positive)):
        return
    wanted = f"a positive number of {unit}" if positive else f"a number of {unit}, 0 or more"
    _refuse(contract, f"{field} must be {wanted}, not {_short_repr(value)}")


def _check_integer(contract: Contract, field: str) -> None:
    value = getattr(contract, field)
    if type(value) is not int or value < 1:
        _refuse(contract, f"{field} must be an integer, 1 or more, not {_short_repr(value)}")


# ───────────────────────────── schema ─────────────────────────────


def _parse_upcasters(contract: Contract) -> Upcasters:
    given: Any = contract.upcasters
    if not isinstance(given, Mapping):
        _refuse(contract, f"upcasters must map each version to a function, not be a {type(given).__name__}")
    for version, upcaster in given.items():
        _check_upcaster(contract, version, upcaster)
    oldest = min(given, default=contract.schema_version)
    missing = (n for n in range(oldest, contract.schema_version) if n not in given)
    gaps = [f"no upcaster from {n} to {n + 1}" for n in islice(missing, 10)]  # versions may be dates
    if gaps:
        _refuse(contract, f"the chain of upcasters has a gap: {', '.join(gaps)}; add the missing ones")
    return Upcasters(sorted(given.items()))


def _check_upcaster(contract: Contract, version: Any, upcaster: Any) -> None:
    if type(version) is not int or version < 1:
        _refuse(
            contract,
            f"the key of an upcaster must be the version it starts from, 1 or more, not {_short_repr(version)}",
        )
    step = f"the upcaster from {version} to {version + 1}"
    if version >= contract.schema_version:
        _refuse(
            contract,
            f"{step} leads beyond schema_version={contract.schema_version}; raise schema_version or remove it",
        )
    if not callable(upcaster):
        _refuse(contract, f"{step} must be a function of the payload, not {type(upcaster).__name__}")
    if is_async(upcaster):
        _refuse(contract, f"{step} is a coroutine function; upcasters must be plain functions")
    check_function(upcaster, f"consumer {_short_repr(contract.consumer_id)}: {step}", asynchronous=False)


def _check_model(contract: Contract) -> None:
    if contract.model is None:
        return
    if not is_model(contract.model):
        _refuse(
            contract,
            "model must be a pydantic model, a msgspec Struct, a dataclass or a TypedDict, "
            f"not {_short_repr(contract.model)}",
        )
    strict = forbidding(contract.model)
    if strict is not None:
        _refuse(
            contract,
            f"the model {_name_of(strict)} forbids unknown fields, so the first producer that adds one would stop "
            "this consumer; allow them (pydantic: extra='ignore', msgspec: forbid_unknown_fields=False)",
        )

"""Events: the same view of every kind of input, and nothing in it that differs between copies."""

from __future__ import annotations

import copy
import pickle
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward import Transaction
from onceward._ids import FIRST_DAY, LAST_DAY
from onceward.errors import ConfigurationError, OncewardError
from onceward.inbox.errors import (
    Breach,
    ContractError,
    EffectError,
    EffectInDoubtError,
    EffectRefused,
    LeaseLostError,
    UnregisteredConsumerError,
)
from onceward.inbox.event import LONGEST_ID, LONGEST_TYPE, Event
from onceward.queue.messages import QueueMessage
from onceward.task.exceptions import ExceptionCategory, TransactionException

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
NOON_DAY = 20513
SECRET = "4111-1111-1111-1111"


def event(**changes: Any) -> Event:
    return Event(
        **{"tracking_id": "e1", "event_type": "paid", "created_at": NOON, "payload": None, **changes}
    )


def uuid7(ms: int, noise: int = 0) -> uuid.UUID:
    return uuid.UUID(int=ms << 80 | 0x7 << 76 | 0b10 << 62 | noise & (2**62 - 1))


DAY_MS = 86_400_000
BELIEVED = uuid7(int((NOON - timedelta(days=30)).timestamp() * 1000))


def message(payload: Any, id: str = "1772366400000-3", deliveries: int | None = 2) -> QueueMessage:
    return QueueMessage(stream="orders", group="g", id=id, payload=payload, deliveries=deliveries)


def refusal(thing: Any) -> ContractError:
    with pytest.raises(ContractError) as caught:
        Event.of(thing)
    return caught.value


class TestViewOfATransaction:
    FIELDS = ("event_type", "aggregate_id", "sequence", "lock_token")
    VALUES: ClassVar[dict[str, Any]] = {
        "event_type": "paid",
        "aggregate_id": "a1",
        "sequence": 4,
        "lock_token": "t1",
    }

    def test_its_id_is_the_tracking_id(self) -> None:
        assert Event.of(Transaction(id="t-1")).tracking_id == "t-1"

    def test_a_tracking_id_in_its_metadata_goes_before_its_id(self) -> None:
        assert Event.of(Transaction(id="t-1", metadata={"tracking_id": "m-1"})).tracking_id == "m-1"

    def test_an_empty_tracking_id_in_its_metadata_is_refused_rather_than_replaced(self) -> None:
        assert "tracking_id is an empty str" in refusal(Transaction(metadata={"tracking_id": ""})).message

    def test_its_payload_is_the_events(self) -> None:
        payload = {"amount": 3}
        assert Event.of(Transaction(payload=payload)).payload is payload

    @pytest.mark.parametrize("field", FIELDS)
    def test_fields_come_from_the_metadata(self, field: str) -> None:
        assert getattr(Event.of(Transaction(metadata=self.VALUES)), field) == self.VALUES[field]

    @pytest.mark.parametrize("field", FIELDS)
    def test_fields_come_from_the_payload_if_the_metadata_has_none(self, field: str) -> None:
        assert getattr(Event.of(Transaction(payload=self.VALUES)), field) == self.VALUES[field]

    @pytest.mark.parametrize("field", FIELDS)
    def test_the_metadata_goes_before_the_payload(self, field: str) -> None:
        other = {"event_type": "other", "aggregate_id": "a2", "sequence": 9, "lock_token": "t2"}
        assert (
            getattr(Event.of(Transaction(payload=other, metadata=self.VALUES)), field) == self.VALUES[field]
        )

    def test_a_sequence_of_zero_in_the_metadata_counts_as_given(self) -> None:
        assert Event.of(Transaction(payload={"sequence": 5}, metadata={"sequence": 0})).sequence == 0

    def test_a_payload_that_is_no_mapping_gives_no_fields(self) -> None:
        bare = Event.of(Transaction(payload=[1, 2]))
        assert (bare.event_type, bare.aggregate_id, bare.sequence, bare.lock_token) == ("", None, None, None)

    @pytest.mark.parametrize(
        ("payload", "metadata", "version"),
        [
            ({"schema_version": 3}, {"schema_version": 2}, 3),
            ({}, {"schema_version": 2}, 2),
            ("text", {"schema_version": 2}, 2),
            ({"schema_version": None}, {}, 1),
            ({"schema_version": None}, {"schema_version": 2}, 2),
        ],
    )
    def test_the_payloads_own_schema_version_goes_first(
        self, payload: Any, metadata: dict[str, Any], version: int
    ) -> None:
        assert Event.of(Transaction(payload=payload, metadata=metadata)).schema_version == version

    @pytest.mark.req("CC-021")
    def test_an_absent_schema_version_is_1(self) -> None:
        assert Event.of(Transaction(payload={"amount": 3})).schema_version == 1

    def test_its_time_is_the_events(self) -> None:
        assert Event.of(Transaction(created_at=NOON)).created_at == NOON

    def test_a_time_in_the_metadata_goes_before_its_own(self) -> None:
        sent_again = Transaction(metadata={"tracking_id": "m-1", "created_at": NOON.isoformat()})
        assert Event.of(sent_again).created_at == NOON

    def test_a_created_at_in_the_payload_is_the_business_of_the_payload(self) -> None:
        assert Event.of(Transaction(created_at=NOON, payload={"created_at": "last week"})).created_at == NOON


class TestViewOfAMapping:
    def test_a_flat_mapping_is_the_payload_itself(self) -> None:
        flat = {"tracking_id": "e1", "created_at": NOON, "event_type": "paid", "amount": 3}
        seen = Event.of(flat)
        assert (seen.tracking_id, seen.event_type, seen.payload) == ("e1", "paid", flat)

    def test_a_mapping_with_a_payload_is_an_envelope(self) -> None:
        seen = Event.of({"tracking_id": "e1", "created_at": NOON, "event_type": "paid", "payload": {"a": 1}})
        assert (seen.tracking_id, seen.event_type, seen.payload) == ("e1", "paid", {"a": 1})

    def test_the_payload_in_an_envelope_tells_its_own_schema_version(self) -> None:
        envelope = {"tracking_id": "e1", "created_at": NOON, "schema_version": 1}
        assert Event.of({**envelope, "payload": {"schema_version": 2}}).schema_version == 2

    def test_without_a_tracking_id_it_is_no_event(self) -> None:
        error = refusal({"created_at": NOON, "card": SECRET})
        assert error.kind is Breach.ENVELOPE
        assert "tracking_id" in error.message

    def test_without_a_time_of_its_own_it_is_refused(self) -> None:
        error = refusal({"tracking_id": "e1", "card": SECRET})
        assert error.kind is Breach.ENVELOPE
        assert "'e1' has no created_at" in error.message

    def test_a_uuid_of_version_7_is_a_time_of_its_own(self) -> None:
        ms = int(NOON.timestamp() * 1000)
        assert Event.of({"tracking_id": str(uuid7(ms))}).created_at == NOON

    @pytest.mark.parametrize("text", ["2026-03-01T12:00:00Z", "2026-03-01T13:00:00+01:00"])
    def test_a_time_may_be_iso_text(self, text: str) -> None:
        assert Event.of({"tracking_id": "e1", "created_at": text}).created_at == NOON

    @pytest.mark.parametrize(
        ("created_at", "found"),
        [
            ("yesterday", "a str that is not an ISO 8601 time"),
            ("2026-03-01T12:00:00", "a datetime without a time zone"),
            (1772366400, "int"),
            (datetime(2026, 3, 1), "a datetime without a time zone"),
        ],
    )
    def test_a_time_that_is_none_is_refused(self, created_at: Any, found: str) -> None:
        assert f"created_at is {found}" in refusal({"tracking_id": "e1", "created_at": created_at}).message

    def test_an_impossible_time_in_an_id_is_refused(self) -> None:
        error = refusal({"tracking_id": str(uuid7(2**48 - 1))})
        assert "after the year 9999" in error.message

    def test_any_kind_of_mapping_will_do(self) -> None:
        assert Event.of(MappingProxyType({"tracking_id": "e1", "created_at": NOON})).tracking_id == "e1"


class TestViewOfAQueuesMessage:
    def test_its_stream_and_entry_id_are_an_id_where_the_producer_gave_none(self) -> None:
        assert Event.of(message({"amount": 3})).tracking_id == "orders:1772366400000-3"

    def test_a_tracking_id_in_its_payload_goes_first(self) -> None:
        assert Event.of(message({"tracking_id": "e1"})).tracking_id == "e1"

    def test_its_entry_id_tells_the_time(self) -> None:
        assert Event.of(message("text")).created_at == NOON

    def test_a_time_in_its_payload_goes_first(self) -> None:
        assert Event.of(message({"created_at": "2020-01-01T00:00:00Z"})).created_at.year == 2020

    def test_the_time_in_a_tracking_id_goes_before_the_entrys(self) -> None:
        assert Event.of(message({"tracking_id": str(uuid7(0))})).created_at.year == 1970

    def test_it_says_how_often_it_was_delivered(self) -> None:
        assert Event.of(message({})).deliveries == 2

    def test_it_may_not_say_how_often_it_was_delivered(self) -> None:
        assert Event.of(message({}, deliveries=None)).deliveries is None

    def test_an_envelope_in_it_is_opened(self) -> None:
        assert Event.of(message({"tracking_id": "e1", "payload": {"a": 1}})).payload == {"a": 1}

    def test_a_payload_key_without_a_tracking_id_makes_no_envelope(self) -> None:
        assert Event.of(message({"payload": 1})).payload == {"payload": 1}

    def test_a_delivery_is_reported_from_another_by_nothing_but_its_count(self) -> None:
        first = message({"a": 1})
        again = Event.of(replace(first, deliveries=3))
        assert msgspec.structs.replace(again, deliveries=2) == Event.of(first)

    @pytest.mark.parametrize("id", ["", "x-1", "17723-", "٣-1", "99999999999999999999-0"])
    def test_an_entry_id_that_tells_no_time_is_refused(self, id: str) -> None:
        assert refusal(message({}, id=id)).kind is Breach.ENVELOPE


class TestViewOfOthers:
    def test_an_event_is_returned_as_it_is(self) -> None:
        made = event()
        assert Event.of(made) is made

    @pytest.mark.parametrize("thing", [None, "e1", 7, [], object()])
    def test_anything_else_is_a_mistake_of_the_caller(self, thing: Any) -> None:
        with pytest.raises(TypeError, match=f"not {type(thing).__name__}"):
            Event.of(thing)


class TestFields:
    WRONG: ClassVar[list[tuple[str, Any, str]]] = [
        ("tracking_id", "", "an empty str"),
        ("tracking_id", None, "NoneType"),
        ("tracking_id", True, "bool"),
        ("tracking_id", 1.5, "float"),
        ("tracking_id", 2**64, "int"),
        ("tracking_id", "x" * (LONGEST_ID + 1), f"a str of {LONGEST_ID + 1} characters"),
        ("tracking_id", "a\x00b", "a str with control characters"),
        ("tracking_id", "a\ud800", "a str with control characters"),
        ("event_type", None, "NoneType"),
        ("event_type", 7, "int"),
        ("event_type", "x" * (LONGEST_TYPE + 1), f"a str of {LONGEST_TYPE + 1} characters"),
        ("event_type", "a\nb", "a str with control characters"),
        ("aggregate_id", "", "an empty str"),
        ("aggregate_id", ["a"], "list"),
        ("lock_token", b"t", "bytes"),
        ("sequence", -1, "an int below 0"),
        ("sequence", True, "bool"),
        ("sequence", "4", "str"),
        ("sequence", 4.0, "float"),
        ("sequence", 2**63, "an int beyond 64 bits"),
        ("schema_version", 0, "an int below 1"),
        ("schema_version", True, "bool"),
        ("schema_version", "2", "str"),
        ("schema_version", None, "NoneType"),
        ("deliveries", -1, "an int below 0"),
        ("deliveries", "1", "str"),
        ("created_at", "2026-03-01", "str"),
        ("created_at", datetime(2026, 3, 1), "a datetime without a time zone"),
        ("created_at", datetime.min.replace(tzinfo=timezone(timedelta(hours=1))), "outside the range of UTC"),
    ]

    @pytest.mark.parametrize(("field", "value", "found"), WRONG)
    def test_a_value_of_the_wrong_kind_is_refused_by_field_and_kind(
        self, field: str, value: Any, found: str
    ) -> None:
        with pytest.raises(ContractError) as caught:
            event(**{field: value})
        assert f"{field} is {found}" in caught.value.message
        assert caught.value.kind is Breach.ENVELOPE

    @pytest.mark.parametrize("field", ["event_type", "aggregate_id", "sequence", "lock_token"])
    def test_a_refusal_names_the_event_and_not_its_data(self, field: str) -> None:
        error = refusal({"tracking_id": "e1", "created_at": NOON, "card": SECRET, field: [SECRET]})
        assert error.tracking_id == "e1"
        assert "event 'e1'" in str(error)
        assert SECRET not in f"{error}{error!r}"

    @pytest.mark.parametrize("field", ["tracking_id", "aggregate_id", "lock_token"])
    @pytest.mark.parametrize("value", [42, uuid.UUID(int=42)])
    def test_ids_become_text(self, field: str, value: Any) -> None:
        assert getattr(event(**{field: value}), field) == str(value)

    def test_a_number_that_python_would_not_even_print_is_refused_too(self) -> None:
        with pytest.raises(ContractError, match="tracking_id of type int"):
            event(tracking_id=10**5000)

    def test_an_event_type_may_be_absent(self) -> None:
        assert event(event_type="").event_type == ""

    def test_times_are_reported_in_utc(self) -> None:
        created_at = event(created_at=NOON.astimezone(timezone(timedelta(hours=-8)))).created_at
        assert (created_at, created_at.tzinfo) == (NOON, UTC)

    def test_an_event_cannot_be_changed(self) -> None:
        with pytest.raises(AttributeError):
            event().sequence = 3  # type: ignore[misc]

    def test_its_repr_has_no_payload(self) -> None:
        assert SECRET not in repr(event(payload={"card": SECRET}))

    def test_it_pickles(self) -> None:
        made = event(payload={"a": [1]}, sequence=3)
        assert pickle.loads(pickle.dumps(made)) == made


class TestDay:
    def test_it_counts_from_1970(self) -> None:
        assert event(created_at=datetime(1970, 1, 2, tzinfo=UTC)).day == 1

    def test_it_is_that_of_the_created_at(self) -> None:
        assert event().day == NOON_DAY

    def test_it_is_that_of_utc_wherever_the_producer_is(self) -> None:
        late = datetime(2026, 2, 28, 23, 30, tzinfo=timezone(timedelta(hours=-2)))
        assert event(created_at=late).day == NOON_DAY

    def test_before_1970_it_is_negative(self) -> None:
        assert event(created_at=datetime(1969, 12, 31, 23, tzinfo=UTC)).day == -1

    @pytest.mark.parametrize("shape", [str, lambda id_: id_.hex, lambda id_: str(id_).upper()])
    def test_the_time_in_a_uuid_of_version_7_goes_before_created_at(self, shape: Any) -> None:
        id_ = shape(uuid7(int(NOON.timestamp() * 1000), noise=2**61))
        assert event(tracking_id=id_, created_at=NOON + timedelta(days=3)).day == NOON_DAY

    @pytest.mark.parametrize(
        "id_",
        [
            str(uuid.UUID(int=BELIEVED.int & ~(0xF << 76) | 0x4 << 76)),  # version 4
            str(uuid.UUID(int=BELIEVED.int | 0b11 << 62)),  # another variant
            "{" + str(BELIEVED),
            str(BELIEVED)[:-1],
            str(BELIEVED) + "0",
            str(uuid7(FIRST_DAY * DAY_MS - 1)),
            str(uuid7((LAST_DAY + 1) * DAY_MS)),
            "0123-5678-901-7345-8901-234567890123",
            "٠" * 12 + "7" + "0" * 3 + "8" + "0" * 15,
            "order-123456-7",
        ],
    )
    def test_an_id_that_only_looks_like_one_tells_no_time(self, id_: str) -> None:
        assert event(tracking_id=id_).day == NOON_DAY

    @given(
        ms=st.integers(FIRST_DAY * DAY_MS, (LAST_DAY + 1) * DAY_MS - 1),
        noise=st.integers(0),
        created_at=st.datetimes(timezones=st.just(UTC)),
    )
    def test_a_uuid7_has_one_day_whenever_and_however_it_comes(
        self, ms: int, noise: int, created_at: datetime
    ) -> None:
        id_ = uuid7(ms, noise)
        days = {event(tracking_id=text, created_at=created_at).day for text in (str(id_), id_.hex)}
        assert days == {ms // DAY_MS}

    @given(
        created_at=st.datetimes(datetime(1900, 1, 2), datetime(9000, 1, 1), timezones=st.timezones()),
        zone=st.integers(-23, 23),
    )
    def test_a_copy_that_tells_its_time_elsewhere_has_the_same_day(
        self, created_at: datetime, zone: int
    ) -> None:
        elsewhere = created_at.astimezone(UTC).astimezone(timezone(timedelta(hours=zone)))
        assert event(created_at=created_at).day == event(created_at=elsewhere).day


DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 99), inner, max_size=4)
    ),
    max_leaves=12,
)


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


class TestDigest:
    def test_it_is_a_sha256(self) -> None:
        assert [len(form) for form in event().digest] == [32, 32]

    @given(DATA)
    def test_the_order_of_keys_does_not_count(self, payload: Any) -> None:
        assert event(payload=payload).digest == event(payload=reordered(payload)).digest

    @given(DATA)
    def test_it_is_the_same_after_a_journey_over_the_wire(self, payload: Any) -> None:
        there = msgspec.msgpack.decode(msgspec.msgpack.encode(payload))
        assert event(payload=there).digest == event(payload=payload).digest

    @pytest.mark.parametrize("keys", [(lambda n: n), str], ids=["numbers", "texts"])
    def test_what_looks_alike_is_not_the_same(self, keys: Any) -> None:
        alike: list[Any] = [
            1,
            1.0,
            True,
            "1",
            b"1",
            [1],
            [[1]],
            {keys(1): 1},
            {keys(1): 1.0},
            None,
            0,
            "",
            [],
            {},
        ]
        assert len({event(payload={keys(0): value}).digest for value in alike}) == len(alike)

    def test_a_number_as_key_is_not_the_text_of_it(self) -> None:
        assert event(payload={1: "a"}).digest != event(payload={"1": "a"}).digest

    def test_nothing_but_type_and_payload_counts(self) -> None:
        other = event(tracking_id="e2", sequence=9, lock_token="t", deliveries=4)
        assert other.digest == event().digest

    @pytest.mark.req("CC-120")
    def test_no_event_type_is_like_another_or_like_the_payload_alone(self) -> None:
        digests = [event(event_type=each).digest for each in ("", "placed", "cancelled")]
        assert len({form for digest in digests for form in digest}) == 4
        assert len({digest.payload for digest in digests}) == 1

    def test_a_lock_token_in_the_payload_does_not_count(self) -> None:
        claims = [Event.of(message({"amount": 3, "lock_token": token})) for token in ("t1", "t2")]
        assert claims[0].digest == claims[1].digest

    def test_a_lock_token_deeper_in_the_payload_counts(self) -> None:
        tokens = [event(payload={"door": {"lock_token": token}}).digest for token in ("t1", "t2")]
        assert tokens[0] != tokens[1]

    @pytest.mark.parametrize("payload", [object(), {"a": {SECRET: object()}}, 2**70, "\ud800", {1: 2**70}])
    def test_a_payload_that_is_no_data_is_a_breach(self, payload: Any) -> None:
        with pytest.raises(ContractError) as caught:
            _ = event(payload=payload).digest
        assert caught.value.kind is Breach.PAYLOAD
        assert "'e1'" in caught.value.message

    def test_a_payload_within_itself_is_a_breach(self) -> None:
        loop: list[Any] = []
        loop.append(loop)
        with pytest.raises(ContractError):
            _ = event(payload=loop).digest

    def test_its_refusal_quotes_nothing_of_the_payload(self) -> None:
        class Card:
            def __repr__(self) -> str:
                return SECRET

        with pytest.raises(ContractError) as caught:
            _ = event(payload={"card": Card()}).digest
        assert SECRET not in str(caught.value)
        assert (caught.value.__cause__, caught.value.__context__) == (None, None)


class TestErrors:
    @pytest.mark.parametrize(
        ("cls", "base"),
        [
            (ContractError, TransactionException),
            (UnregisteredConsumerError, ConfigurationError),
            (LeaseLostError, OncewardError),
            (EffectError, OncewardError),
            (EffectInDoubtError, OncewardError),
        ],
    )
    def test_each_has_its_place_in_the_tree(self, cls: type, base: type) -> None:
        assert issubclass(cls, base)

    @pytest.mark.parametrize("kind", list(Breach))
    def test_a_breach_is_never_worth_another_try(self, kind: Breach) -> None:
        assert ContractError("no", kind).category is ExceptionCategory.BUSINESS

    def test_its_kind_may_be_given_as_text(self) -> None:
        assert ContractError("no", "too_old").kind is Breach.TOO_OLD

    def test_an_unknown_kind_is_refused(self) -> None:
        with pytest.raises(ValueError, match="strange"):
            ContractError("no", "strange")

    @pytest.mark.parametrize(
        "journey", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy], ids=["pickle", "copy"]
    )
    def test_a_breach_keeps_all_it_knows_on_a_journey(self, journey: Any) -> None:
        arrived = journey(ContractError("no", Breach.GAP, "e1", ValueError("why")))
        assert (arrived.message, arrived.kind, arrived.tracking_id, arrived.category, str(arrived.cause)) == (
            "no",
            Breach.GAP,
            "e1",
            ExceptionCategory.BUSINESS,
            "why",
        )

    def test_doubt_and_refusal_pickle(self) -> None:
        arrived = pickle.loads(pickle.dumps(EffectInDoubtError("who knows", "e1")))
        assert (arrived.message, arrived.kind, arrived.tracking_id) == ("who knows", Breach.IN_DOUBT, "e1")
        refused = pickle.loads(pickle.dumps(EffectRefused("card declined")))
        assert (refused.message, refused.category) == ("card declined", ExceptionCategory.BUSINESS)

    @pytest.mark.parametrize("cls", [UnregisteredConsumerError, LeaseLostError, EffectError])
    def test_the_others_pickle_too(self, cls: type[OncewardError]) -> None:
        arrived = pickle.loads(pickle.dumps(cls("so it is")))
        assert (type(arrived), str(arrived)) == (cls, "so it is")

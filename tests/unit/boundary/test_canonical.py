"""Canonical JSON, checked with the test vectors of RFC 8785; and what makes two facts the same."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward.boundary.canonical import canonical, content_digest
from onceward.boundary.errors import InvalidArgument
from onceward.boundary.model import Envelope, Fact

ENVELOPE = Envelope(message_id="m1", from_zone="a", to_zone="b", produced_at_unix_ms=1)
FACT = Fact(subject="batch:B1", predicate="done", object_json='{"a":1,"b":2}')

WORDS = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS_OF_JSON = st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS_OF_JSON | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)

# Appendix B: the bits of a double, and its text.
NUMBERS = [
    ("0000000000000000", "0"),
    ("8000000000000000", "0"),
    ("0000000000000001", "5e-324"),
    ("8000000000000001", "-5e-324"),
    ("7fefffffffffffff", "1.7976931348623157e+308"),
    ("ffefffffffffffff", "-1.7976931348623157e+308"),
    ("4340000000000000", "9007199254740992"),
    ("c340000000000000", "-9007199254740992"),
    ("4430000000000000", "295147905179352830000"),
    ("44b52d02c7e14af5", "9.999999999999997e+22"),
    ("44b52d02c7e14af6", "1e+23"),
    ("44b52d02c7e14af7", "1.0000000000000001e+23"),
    ("444b1ae4d6e2ef4e", "999999999999999700000"),
    ("444b1ae4d6e2ef4f", "999999999999999900000"),
    ("444b1ae4d6e2ef50", "1e+21"),
    ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
    ("3eb0c6f7a0b5ed8d", "0.000001"),
    ("41b3de4355555553", "333333333.3333332"),
    ("41b3de4355555554", "333333333.33333325"),
    ("41b3de4355555555", "333333333.3333333"),
    ("41b3de4355555556", "333333333.3333334"),
    ("41b3de4355555557", "333333333.33333343"),
    ("becbf647612f3696", "-0.0000033333333333333333"),
    ("43143ff3c1cb0959", "1424953923781206.2"),
]
# Sections 3.2.2 and 3.2.3, and the samples published with the RFC.
TEXTS = [
    (
        r"""{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]}""",
        r"""{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"""
        r""""string":"€$\u000f\nA'B\"\\\\\"/"}""",
    ),
    (
        r"""{"\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter Dalet With Dagesh", "1": "One",
        "\ud83d\ude00": "Emoji: Grinning Face", "\u0080": "Control",
        "\u00f6": "Latin Small Letter O With Diaeresis"}""",
        '{"\\r":"Carriage Return","1":"One","\x80":"Control","ö":"Latin Small Letter O With Diaeresis",'
        '"€":"Euro Sign","😀":"Emoji: Grinning Face","\ufb33":"Hebrew Letter Dalet With Dagesh"}',
    ),
    ('[ 56, { "d": true, "10": null, "1": [ ] } ]', '[56,{"1":[],"10":null,"d":true}]'),
    (
        r"""{"1": {"f": {"f": "hi","F": 5}, "\n": 56.0}, "10": {}, "": "empty", "a": {},
        "111": [{"e": "yes", "E": "no"}], "A": {}}""",
        r"""{"":"empty","1":{"\n":56,"f":{"F":5,"f":"hi"}},"10":{},"111":[{"E":"no","e":"yes"}],"A":{},"a":{}}""",
    ),
    ('{"Unnormalized Unicode":"A\u030a"}', '{"Unnormalized Unicode":"A\u030a"}'),
    ("-0", "0"),
    ("-0.0", "0"),
    ('  "plain"  ', '"plain"'),
    ("10E-1", "1"),
    ("10000000000000000000000", "1e+22"),
    ("9007199254740992.0", "9007199254740992"),
    ("6.02214076e23", "6.02214076e+23"),
]


@pytest.mark.req("BC-15")
@pytest.mark.parametrize(("bits", "written"), NUMBERS)
def test_a_number_is_written_as_the_rfc_says(bits: str, written: str) -> None:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical(json.dumps(value)).decode() == written
    assert canonical(written).decode() == written


@pytest.mark.req("BC-15")
@pytest.mark.parametrize(("text", "written"), TEXTS)
def test_a_text_is_written_as_the_rfc_says(text: str, written: str) -> None:
    assert canonical(text).decode() == written


@pytest.mark.req("BC-18")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("{", ""),
        ("{'a': 1}", ""),
        ("[1,]", ""),
        ("nul", ""),
        ("01", ""),
        ('"a" "b"', ""),
        ("NaN", "malformed"),
        ("[Infinity]", ""),
        ('{"a":1,"a":2}', "same name twice"),
        ('{"x":{"a":1,"b":0,"a":1}}', "same name twice"),
        ('{"ä":1,"ä":2}', "same name twice"),
        (r'"\ud800"', "non-UTF-8"),
        (r'{"\udead":1}', "surrogate"),
        ("9007199254740993.0", "send it as a string"),
        ("[9007199254740993e0]", "send it as a string"),
        ("100000000000000000000000", "send it as a string"),
        ("1e999", "send it as a string"),
        ("1e999999999999999999999", "send it as a string"),
        ("[-1.5E+99999999999999999999]", "send it as a string"),
        ("9007199254740993", "send it as a string"),
        ("-9007199254740993", "send it as a string"),
        ("1" + "0" * 500, "send it as a string"),
        ("1" * 5000, "out of range"),
        ("[" * 100_000, ""),
        ("[" * 100_000 + "]" * 100_000, "nested too deep"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deep"),
        ('"ä' + "[" * 10 + '"' + "]", ""),
    ],
)
def test_what_is_no_json_or_cannot_be_kept_exactly_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words or None):
        canonical(text)


@given(JSON)
def test_the_short_way_and_the_long_way_agree(value: object) -> None:
    plain = json.dumps(value, ensure_ascii=False)
    spaced = json.dumps(value, ensure_ascii=True, indent=2)
    assert canonical(plain) == canonical(spaced)
    assert json.loads(canonical(plain), parse_int=float) == json.loads(plain, parse_int=float)
    assert canonical(canonical(plain).decode()) == canonical(plain)


@pytest.mark.req("BC-15")
@pytest.mark.parametrize(
    "same", ['{"b":2,"a":1}', ' { "a" : 1 ,\n"b" : 2 } ', '{"a":1.0,"b":2e0}', r'{"\u0061":1,"b":2}']
)
def test_key_order_white_space_and_spelling_do_not_make_another_fact(same: str) -> None:
    other = Fact(subject=FACT.subject, predicate=FACT.predicate, object_json=same)
    assert content_digest(ENVELOPE, other) == content_digest(ENVELOPE, FACT)


@pytest.mark.req("BC-15")
@pytest.mark.parametrize(
    "change",
    [
        {"message_id": "m2"},
        {"produced_at_unix_ms": 2},
        {"correlation_id": "c"},
        {"causation_id": "c"},
        {"labels": {"site": "x"}},
    ],
)
def test_time_labels_and_lineage_do_not_make_another_fact(change: dict[str, object]) -> None:
    assert content_digest(_changed(ENVELOPE, change), FACT) == content_digest(ENVELOPE, FACT)


@pytest.mark.req("BC-15")
@pytest.mark.parametrize(
    "change",
    [
        {"subject": "batch:B2"},
        {"predicate": "begun"},
        {"object_json": '{"a":1,"b":3}'},
        {"from_zone": "x"},
        {"to_zone": "x"},
        {"object_media_type": "text/plain"},
        {"object_schema": "urn:x"},
    ],
)
def test_subject_predicate_object_zones_media_type_and_schema_make_another_fact(
    change: dict[str, str],
) -> None:
    envelope = _changed(ENVELOPE, {key: value for key, value in change.items() if hasattr(ENVELOPE, key)})
    fact = _changed(FACT, {key: value for key, value in change.items() if hasattr(FACT, key)})
    assert content_digest(envelope, fact) != content_digest(ENVELOPE, FACT)


def test_what_belongs_to_one_part_cannot_pass_for_another() -> None:
    one = Fact(subject="batch:B1", predicate="done_x", object_json="1")
    other = Fact(subject="batch:B1done", predicate="x", object_json="1")
    assert content_digest(ENVELOPE, one) != content_digest(ENVELOPE, other)


def test_an_object_that_is_no_json_names_its_field() -> None:
    with pytest.raises(InvalidArgument, match=r"fact\.object_json cannot be stored as JSON") as raised:
        content_digest(ENVELOPE, Fact(subject="a:b", predicate="p", object_json="{"))
    assert raised.value.field == "fact.object_json"


def _changed(value: object, change: dict[str, object]) -> object:
    import msgspec

    return msgspec.structs.replace(value, **change)

"""Letters that died of the same error are one group."""

from __future__ import annotations

import pytest

from onceward.deadletters import Category, Filter
from onceward.deadletters.groups import ErrorKind, normalize
from tests.support.deadletters.world import Letters, burial

pytest_plugins = ("tests.support.databases", "tests.support.deadletters.site")

pytestmark = pytest.mark.req("CC-083")

UUID = "3fa85f64-5717-4562-b3fc-2c963f66afa6"
KINDS = {
    "no account of u1@shop.example or ann+x@mail.shop.example": "no account of <email> or <email>",
    "order ORD4711 of user42: HTTP404, not UTF8 or sha256": "order <id> of <id>: HTTP404, not UTF8 or sha256",
    "SYSTEM [o1]: ConnectionError: ledger 10.0.0.7:5432 is down": "ledger <number>:<number> is down",
    f"SYSTEM [{UUID}]: ValueError: order {UUID} of 2026-01-01T10:00:00.5Z": "order <uuid> of <time>",
    "ValueError: no account 'anna' in \"books\"": "no account <value> in <value>",
    "FileNotFoundError: /var/lib/shop/a-7.json is missing": "<path> is missing",
    "KeyError: 0x7f3a, deadbeef01, -1.5e3": "<hex>, <hex>, <number>",
    "shop.errors.Refused: order-17 refused": "order-<number> refused",
    "BUSINESS [order-ax7]: order-ax7 has no currency": "<id> has no currency",
    "SYSTEM [x7]: no x7 in x77": "no <id> in x77",
    "BUSINESS [order-17]: order-17 refused": "order-<number> refused",
    "BUSINESS [d2]: event d2 is unknown, its key d2-1-b35a8ca5a2d4 is old": (
        "event <id> is unknown, its key <id>-<number>-<hex> is old"
    ),
    "BUSINESS [404]: bank said HTTP 404 of 404": "bank said HTTP 404 of <number>",
    "order 7 of o7, user7 and A7 failed": "order <number> of <id>, <id> and <id> failed",
    "step1 of s3 by v2, ipv4, md5, psycopg2": "step1 of s3 by v2, ipv4, md5, psycopg2",
    "order 7: HTTP 404": "order <number>: HTTP 404",
    "HTTP/1.1 503 from 10.0.0.7": "HTTP/<number> 503 from <number>",
    "status code: 404, status=500": "status code: 404, status=500",
    "{'status': 502, 'id': 'x'}": "{<value>: 502, <value>: <value>}",
    "error code 7, exit code -9, [Errno 111] 7": "error code 7, exit code -9, [Errno 111] <number>",
    "SQLSTATE 42P01, ORA-12541, ORD-12541": "SQLSTATE 42P01, ORA-12541, ORD-<number>",
    "HTTPStatusError: Client error '404 Not Found' for url 'http://a/7'": (
        "Client error '404 Not Found' for url <value>"
    ),
    "the status of 7 orders; http://a:80/7": "the status of <number> orders; http://a:<number>/<number>",
}


@pytest.mark.parametrize("error", KINDS)
def test_messages_are_normalized(error: str) -> None:
    assert normalize(error).message == KINDS[error]


@pytest.mark.parametrize(
    "part", ["QUJD+", "a.", "a-", "a@", "x", "7", "_", "«", "“", "'", '"', "/a", "0x", " ", "\n", "a: "]
)
@pytest.mark.timeout(60)  # seconds; it takes half of one, and took minutes
def test_a_long_error_takes_no_longer_than_reading(part: str) -> None:
    """These took minutes with patterns that try every start, and the worker did nothing else meanwhile."""
    normalize(f"ValueError: it said {part * (600_000 // len(part))} and no more")


def test_the_class_is_what_was_raised() -> None:
    assert normalize("SYSTEM [a]: shop.errors.Refused: x") == ErrorKind("Refused", "x")
    assert normalize("BUSINESS [a]: card 7 expired") == ErrorKind("", "card <number> expired")
    assert normalize("TIMEOUT [a]: attempt 1 of process took longer than 2 s").error_class == ""
    assert normalize("KeyError") == ErrorKind("KeyError", "")
    assert normalize("") == ErrorKind("", "")


def test_groups_count_letters_with_first_last_and_an_example(letters: Letters) -> None:
    letters.bury(*(burial(f"m{n}", error=f"SYSTEM [m{n}]: ValueError: no account {n}") for n in range(3)))
    letters.advance(60)
    letters.bury(
        burial("m3", error="SYSTEM [m3]: ValueError: no account 3"),
        burial("m4", error="SYSTEM [m4]: KeyError: no account 4"),
        burial("m5", event_type="order.sent", error="SYSTEM [m5]: ValueError: no account 5"),
        burial("m6", consumer="shipping", error="SYSTEM [m6]: ValueError: no account 6"),
        burial("killer", category=Category.POISON, error="delivered, and never came to an end"),
    )
    largest, *others = letters.groups()
    assert (largest.consumer, largest.event_type) == ("billing", "order.paid")
    assert (largest.error_class, largest.message) == ("ValueError", "no account <number>")
    assert (largest.letters, largest.example) == (4, 1)
    assert (largest.last_at - largest.first_at).total_seconds() >= 60
    assert [each.letters for each in others] == [1, 1, 1, 1]
    assert [each.letters for each in letters.groups(Filter(consumer="billing", text="no account"))] == [
        4,
        1,
        1,
    ]
    assert letters.groups(Filter(consumer="nobody")) == []


def test_one_digit_ids_are_one_group_and_status_codes_are_not(letters: Letters) -> None:
    letters.bury(*(burial(f"m{n}", error=f"SYSTEM [m{n}]: no order o{n}") for n in (7, 8, 12)))
    letters.bury(*(burial(f"c{n}", error=f"SYSTEM [c{n}]: bank said HTTP {n}") for n in (404, 503)))
    assert sorted((each.letters, each.message) for each in letters.groups()) == [
        (1, "bank said HTTP 404"),
        (1, "bank said HTTP 503"),
        (3, "no order <id>"),
    ]

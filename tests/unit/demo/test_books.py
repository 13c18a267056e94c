"""The parts of the demo that need no process: its orders, its balance, its verdict."""

from __future__ import annotations

from collections import Counter
from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from onceward.demo.balance import DemoBalance, DemoEvidence, compute_balance
from onceward.demo.orders import ARTICLES, DemoOrder, Fate, make_messages, make_orders
from onceward.demo.screen import (
    BarScreen,
    Crash,
    Cut,
    DemoProgress,
    DemoResult,
    LineScreen,
    RedrivenLetter,
    show,
)

# ── orders ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_seed_makes_the_same_orders_and_another_seed_does_not() -> None:
    assert make_orders(500, seed=1) == make_orders(500, seed=1)
    assert make_orders(500, seed=1) != make_orders(500, seed=2)


@pytest.mark.parametrize("number", [100, 3000])
def test_a_demo_has_so_many_different_orders_and_every_fate(number: int) -> None:
    orders = make_orders(number, seed=1)
    assert len({order.id for order in orders}) == number
    assert {order.fate for order in orders} == set(Fate)


def test_only_the_order_that_can_be_fixed_is_for_an_article_that_is_not_listed() -> None:
    unlisted = [order for order in make_orders(3000, seed=1) if order.article not in ARTICLES]
    assert [order.fate for order in unlisted] == [Fate.UNLISTED]


def test_every_order_is_sent_once_but_those_meant_to_be_sent_twice() -> None:
    orders = make_orders(200, seed=1)
    sent = Counter(message.id for message in make_messages(orders, seed=1))
    assert sent == {order.id: 2 if order.fate is Fate.TWICE else 1 for order in orders}


def test_an_order_comes_out_of_its_message_unchanged() -> None:
    order = make_orders(100, seed=1)[0]
    assert DemoOrder.of(order.placed()) == order


# ── the balance ─────────────────────────────────────────────────────────────────────────────────────────

ORDERS = [
    DemoOrder("a", "nails", 7, Fate.PLAIN),
    DemoOrder("b", "screws", 5, Fate.TWICE),
    DemoOrder("c", "nails", 2, Fate.REFUSED),
]


def balance(**other: Any) -> DemoBalance:
    """Four messages, of which one was known; the third order is a dead letter. And what is otherwise."""
    right = DemoEvidence(
        produced=4,
        duplicates=1,
        shop=["a", "b", "c"],
        warehouse=["a", "b", "c"],
        effects={"a": 1, "b": 1},
        dead={"c"},
        stock={"nails": 7, "screws": 5},
    )
    return compute_balance(ORDERS, 4, msgspec.structs.replace(right, **other))


def test_it_balances_when_each_stage_has_what_the_one_before_it_had() -> None:
    struck = balance()
    assert struck.problems == ()
    assert struck.same_log
    assert (struck.appended, struck.forwarded, struck.applied, struck.dead_letters) == (3, 3, 2, 1)
    assert (struck.lost, struck.twice) == (0, 0)
    assert struck.expected_pieces == struck.pieces == 12


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"produced": 3, "duplicates": 0}, "3 of 4 messages were produced"),
        ({"duplicates": 0}, "4 messages were produced, but 3 were appended and 0 were duplicates"),
        (
            {"warehouse": ["a", "b"]},
            "1 orders are in the shop's log but not in the warehouse's: c",
        ),
        (
            {"warehouse": ["a", "b", "c", "x"]},
            "1 orders are in the warehouse's log but not in the shop's: x",
        ),
        (
            {"warehouse": ["b", "a", "c"]},
            "the warehouse has the shop's facts more than once or in another order",
        ),
        (
            {"warehouse": ["a", "a", "b", "c"]},
            "the warehouse has the shop's facts more than once or in another order",
        ),
        ({"dead": set()}, "1 orders are neither shipped nor a dead letter: c"),
        ({"effects": {"a": 1, "b": 2}}, "1 orders are shipped more than once: b"),
        ({"dead": {"b", "c"}}, "1 orders are both shipped and a dead letter: b"),
        ({"dead": {"c", "x"}}, "1 orders are in the books but were never placed: x"),
        (
            {"stock": {"nails": 7, "screws": 10}},
            "10 pieces of screws left the stock, but shipped orders ask for 5",
        ),
    ],
)
def test_it_does_not_balance_and_says_why(other: dict[str, Any], problem: str) -> None:
    assert balance(**other).problems == (problem,)


def test_an_order_that_never_got_into_the_shops_log_is_missing_there_and_at_the_end() -> None:
    problems = balance(produced=3, shop=["a", "b"], warehouse=["a", "b"], dead=set()).problems
    assert "1 orders are not in the shop's log: c" in problems
    assert "1 orders are neither shipped nor a dead letter: c" in problems


def test_pieces_of_the_wrong_article_are_found_though_the_sum_is_right() -> None:
    struck = balance(stock={"nails": 5, "screws": 7})
    assert struck.expected_pieces == struck.pieces
    assert len(struck.problems) == 2


# ── the verdict ─────────────────────────────────────────────────────────────────────────────────────────


def result(struck: DemoBalance, **other: Any) -> DemoResult:
    whole = DemoResult(
        balance=struck,
        fates=dict.fromkeys(map(str, Fate), 1),
        cut=Cut(seconds=3.0, appended=20, applied=10, waiting=15),
        crash=Crash(worker="worker-1", process="worker-1.1", pid=1, held=5, applied_but_held=2),
        redriven=RedrivenLetter(order="c", died_of="not listed", mended_by="listed", applied=True),
        came_again=4,
        recognised=2,
        retries=0,
        timeouts=0,
        dead_letters={"business": 1},
        packed_by={"worker-1.1": 2},
        seconds=20.0,
    )
    return msgspec.structs.replace(whole, **other)


def shown(struck: DemoBalance, **other: Any) -> str:
    printed = StringIO()
    show(Console(file=printed, width=80), result(struck, **other))
    return printed.getvalue()


def test_the_verdict_has_an_equation_for_each_stage() -> None:
    text = shown(balance())
    assert "4 produced   = 3 appended + 1 duplicates" in text
    assert "3 appended   = 3 forwarded, in the same order" in text
    assert "3 forwarded  = 2 applied once + 1 dead letters" in text
    assert "0 lost, 0 applied twice" in text
    assert (text.count("✓"), text.count("✗")) == (4, 0)
    assert "It balances" in text


def test_the_verdict_tells_what_went_wrong_on_the_way() -> None:
    text = shown(balance())
    assert "20 appended and 10 shipped meanwhile" in text
    assert "2 shipped, not acknowledged; 4 redelivered" in text
    assert "dead letter, fixed, redriven, shipped" in text


def test_the_verdict_names_every_problem_and_marks_its_stage() -> None:
    text = shown(balance(dead=set(), effects={"a": 1, "b": 2}))
    assert "It does not balance" in text
    assert "neither shipped nor a dead letter: c" in text
    assert "shipped more than once: b" in text
    assert (text.count("✓"), text.count("✗")) == (2, 2)


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        ("cut", "the link was never cut"),
        ("crash", "no worker was killed"),
        ("redriven", "no dead letter was redriven"),
    ],
)
def test_a_demo_in_which_something_did_not_go_wrong_proves_nothing_and_says_so(
    act: str, problem: str
) -> None:
    assert problem in shown(balance(), **{act: None})


# ── the screen ──────────────────────────────────────────────────────────────────────────────────────────

HALF_WAY = DemoProgress(
    produced=105,
    duplicates=5,
    appended=100,
    forwarded=40,
    confirmed=30,
    applied=33,
    dead=2,
    redriven=1,
    link_is_up=False,
)


def test_a_terminal_of_80_columns_shows_every_stage() -> None:
    printed = StringIO()
    with BarScreen(Console(file=printed, width=80, force_terminal=True, color_system=None)) as screen:
        screen.begin(orders=10_000, messages=10_500)
        screen.show(HALF_WAY)
        screen.announce("link cut", bad=True)
    text = printed.getvalue()
    for reported in (
        "105/10,500",
        "100/10,000",
        "40/10,000",
        "33/9,998",
        "5 duplicates",
        "CUT, 60 facts waiting",
    ):
        assert reported in text
    assert "…" not in text


def test_without_a_terminal_a_line_is_said_now_and_then_and_no_news_is_left_out() -> None:
    printed = StringIO()
    with LineScreen(Console(file=printed, width=80)) as screen:
        screen.begin(orders=100, messages=105)
        screen.show(HALF_WAY)
        screen.show(msgspec.structs.replace(HALF_WAY, applied=34))
        screen.announce("link cut", bad=True)
    assert printed.getvalue().splitlines() == [
        "100 orders in 105 messages",
        "105 produced   100 appended   40 forwarded   33 applied   2 dead   1 redriven",
        "link cut",
    ]

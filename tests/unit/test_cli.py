"""The command line, and the pieces of the demo that need no process."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from importlib.metadata import version
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from onceward.cli.demo.balance import Balance, strike_balance
from onceward.cli.demo.ledger import Ledger, LedgerReader
from onceward.cli.demo.orders import Fate, Order, make_messages, make_orders, message_number
from onceward.cli.demo.result import Crash
from onceward.cli.demo.result import Result as DemoResult
from onceward.cli.demo.summary import show
from onceward.cli.main import app

WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env=WIDE)


# ── arguments ───────────────────────────────────────────────────────────────────────────────────────────


def test_version_is_the_version_of_the_package() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"onceward {version('onceward')}\n")


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "demo" in result.stdout
    assert "See it work" in result.stdout


def test_help_of_the_demo_has_options_exit_codes_and_examples() -> None:
    result = run("demo", "--help")
    assert result.exit_code == 0
    for text in ("--orders", "--workers", "--seed", "--data", "--keep", "--json"):
        assert text in result.stdout
    assert "0 if it balances, 1 if it does not" in result.stdout
    assert "onceward demo --json | jq .balance" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--orders", "99"), "--orders"),
        (("--orders", "many"), "--orders"),
        (("--workers", "0"), "--workers"),
        (("--seed", "x"), "--seed"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_a_bad_argument_is_named_and_ends_with_2(arguments: tuple[str, ...], message: str) -> None:
    result = run("demo", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_data_folder_that_is_not_empty_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep me")
    result = run("demo", "--data", str(tmp_path))
    assert result.exit_code == 2
    assert "is not empty" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_a_data_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("demo", "--data", str(tmp_path / "file" / "below"))
    assert result.exit_code == 2
    assert "cannot be used" in result.stderr


# ── orders ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_seed_makes_the_same_orders_and_another_seed_does_not() -> None:
    assert make_orders(500, seed=1) == make_orders(500, seed=1)
    assert make_orders(500, seed=1) != make_orders(500, seed=2)


@pytest.mark.parametrize("number", [100, 3000])
def test_a_demo_has_so_many_different_orders_and_every_fate(number: int) -> None:
    orders = make_orders(number, seed=1)
    assert len({order.id for order in orders}) == number
    assert {order.fate for order in orders} == set(Fate)


def test_every_order_is_sent_once_but_those_meant_to_be_sent_twice() -> None:
    orders = make_orders(200, seed=1)
    messages = make_messages(orders, seed=1)
    sent = Counter(message.id for message in messages)
    assert sent == {order.id: 2 if order.fate is Fate.TWICE else 1 for order in orders}
    assert [message_number(message) for message in messages] == list(range(len(messages)))


def test_an_order_comes_out_of_its_message_unchanged() -> None:
    (order,) = make_orders(100, seed=1)[:1]
    assert Order.of(make_messages([order], seed=1)[0]) == order


# ── the ledger ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def test_an_order_takes_effect_once_however_often_it_is_applied(path: Path) -> None:
    order = Order("a", "account", 100, Fate.TWICE)
    ledger = Ledger(path)
    assert [ledger.apply(order, message) for message in (1, 1, 2, 2)] == [True, False, False, False]
    with closing(LedgerReader(path)) as books:
        assert books.accounts() == {"account": 100}
        assert books.ids() == {"a"}
        assert (books.count(), books.duplicates(), books.redeliveries()) == (1, 1, 2)


def test_an_order_whose_effect_fails_is_not_in_the_ledger(path: Path) -> None:
    ledger = Ledger(path)
    with pytest.raises(Exception, match="NOT NULL"):
        ledger.apply(Order("a", None, 100, Fate.PLAIN), 1)  # type: ignore[arg-type]
    with closing(LedgerReader(path)) as books:
        assert (books.count(), books.accounts()) == (0, {})


# ── the balance ─────────────────────────────────────────────────────────────────────────────────────────

ORDERS = [
    Order("a", "anna", 100, Fate.PLAIN),
    Order("b", "bert", 50, Fate.TWICE),
    Order("c", "anna", 7, Fate.REFUSED),
]


def balance(
    applied: str = "ab", dead: str = "c", anna: int = 100, bert: int = 50, left_in_queue: int = 0
) -> Balance:
    return strike_balance(ORDERS, set(applied), set(dead), {"anna": anna, "bert": bert}, left_in_queue)


def test_it_balances_when_every_order_is_applied_or_dead_and_the_money_is_right() -> None:
    struck = balance()
    assert (struck.balanced, struck.problems) == (True, ())
    assert (struck.produced, struck.applied, struck.dead_lettered, struck.lost) == (3, 2, 1, 0)
    assert struck.expected_cents == struck.ledger_cents == 150


@pytest.mark.parametrize(
    ("struck", "problem"),
    [
        (balance(dead=""), "1 orders are neither applied nor a dead letter: c"),
        (balance(dead="bc"), "1 orders are both applied and a dead letter: b"),
        (balance(dead="cx"), "1 orders are in the books, but never produced: x"),
        (balance(bert=100), "bert holds 100 cents where its applied orders are worth 50"),
        (balance(left_in_queue=4), "4 messages are still in the queue"),
    ],
)
def test_it_does_not_balance_and_says_why(struck: Balance, problem: str) -> None:
    assert not struck.balanced
    assert struck.problems == (problem,)


def test_money_in_the_wrong_account_is_found_though_the_sum_is_right() -> None:
    struck = balance(anna=50, bert=100)
    assert struck.expected_cents == struck.ledger_cents
    assert not struck.balanced


# ── the verdict ─────────────────────────────────────────────────────────────────────────────────────────

CRASH = Crash(worker="worker-1", process="worker-1.1", pid=1, held=5, applied_but_held=2)


def shown(struck: Balance, crash: Crash | None) -> str:
    printed = StringIO()
    show(Console(file=printed, width=120), result(struck, crash))
    return printed.getvalue()


def result(struck: Balance, crash: Crash | None) -> DemoResult:
    return DemoResult(
        balance=struck,
        fates=dict.fromkeys(map(str, Fate), 1),
        messages=4,
        duplicates=1,
        crash=crash,
        redelivered=5,
        recognised=2,
        dead_letters={"BUSINESS": 1},
        retries=0,
        timeouts=0,
        producing_seconds=0.1,
        consuming_seconds=1.0,
    )


def test_the_verdict_has_the_sum() -> None:
    text = shown(balance(), CRASH)
    assert "It balances: 3 produced = 2 applied + 1 dead-lettered" in text
    assert "5 delivered again, 2 recognised and left out" in text


def test_the_verdict_names_every_problem() -> None:
    text = shown(balance(dead="", bert=100), CRASH)
    assert "It does not balance" in text
    assert "neither applied nor a dead letter: c" in text
    assert "bert holds 100 cents" in text


def test_a_demo_without_a_kill_proves_nothing_and_says_so() -> None:
    assert "no worker was killed" in shown(balance(), None)

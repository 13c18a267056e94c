"""What evidence is bound to: the source that a consumer imports, and the packages in use."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from onceward.app.build import task_class
from onceward.inbox.evidence import distributions, modules
from onceward.inbox.evidence.code_digest import Code, code_of
from onceward.inbox.evidence.distributions import versions_in_use
from onceward.inbox.evidence.modules import syntax_tree
from onceward.inbox.evidence.proof import lacking
from tests.verification import consumers
from tests.verification.proofs import proof

CONSUMER = """
from typing import TYPE_CHECKING
import importlib
from onceward import ConsumerTask
from onceward.inbox import Contract
from gd_sibling.rates import RATE
import gd_loose

if TYPE_CHECKING:
    from gd_typing_only import Name

class Bill(ConsumerTask):
    contract = Contract(consumer_id="billing", event_types=["order"], owner_team="shop",
                        idempotency_mechanism="one transaction")

    def process_transaction(self, transaction, session):
        from gd_space.tax import tax
        import gd_installed.core
        importlib.import_module("gd_named")
        try:
            import gd_optional
        except ImportError:
            pass
"""


class Project:
    """A folder with source, and one with installed packages; both on the path."""

    def __init__(self, folder: Path) -> None:
        self.source, self.site = folder / "src", folder / "site"
        self.write("gd_shop/__init__.py")
        self.write("gd_shop/consumer.py", CONSUMER)
        self.write("gd_sibling/__init__.py")
        self.write("gd_sibling/rates.py", "RATE = 1\n")
        self.write("gd_loose.py", "X = 1\n")
        self.write("gd_space/tax.py", "def tax(): ...\n")  # a namespace package
        self.write("gd_named.py", "X = 1\n")
        self.write("gd_typing_only.py", "Name = str\n")
        self.write("gd_unrelated.py", "X = 1\n")
        self.install(
            "gd_installed", "1.0", "X = 1\n", requires=["gd-needed>=1", 'gd-extra ; extra == "more"']
        )
        self.install("gd_needed", "2.0", "X = 1\n")
        self.install("gd_extra", "3.0", "X = 1\n")

    def write(self, name: str, text: str = "") -> None:
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def install(
        self, package: str, version: str, text: str, requires: list[str] | None = None, pure: bool = True
    ) -> None:
        """As pip does."""
        name = package.replace("_", "-")
        for each in self.site.glob(f"{package}-*.dist-info/*"):
            each.unlink()
        for each in self.site.glob(f"{package}-*.dist-info"):
            each.rmdir()
        info = self.site / f"{package}-{version}.dist-info"
        info.mkdir(parents=True)
        (self.site / package).mkdir(exist_ok=True)
        (self.site / package / "__init__.py").write_text("")
        (self.site / package / "core.py").write_text(text)
        needs = "".join(f"Requires-Dist: {each}\n" for each in requires or [])
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nRoot-Is-Purelib: {str(pure).lower()}\n")
        (info / "RECORD").write_text(
            f"{package}/__init__.py,sha256=0,0\n{package}/core.py,sha256={hash(text)},{len(text)}\n"
            f"{package}-{version}.dist-info/INSTALLER,sha256={hash(version)},4\n"
        )

    def code(self) -> Code:
        self.forget()
        importlib.invalidate_caches()
        bill = importlib.import_module("gd_shop.consumer").Bill
        return code_of(bill, bill.contract)

    def versions(self) -> dict[str, str]:
        found = versions_in_use(self.code().packages, "sqlite")
        return {name: version for name, version in found.items() if name.startswith("gd-")}

    def forget(self) -> None:
        for name in [name for name in sys.modules if name.startswith("gd_")]:
            del sys.modules[name]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    made = Project(tmp_path)
    monkeypatch.syspath_prepend(str(made.source))
    monkeypatch.syspath_prepend(str(made.site))
    yield made
    made.forget()


COVERED = ("gd_loose", "gd_named", "gd_shop.consumer", "gd_sibling.rates", "gd_space.tax")


@pytest.mark.req("CC-030", "CC-068", "CC-069")
def test_the_digest_covers_siblings_that_are_not_installed_and_nothing_else(project: Project) -> None:
    before = project.code()
    assert before.modules == COVERED
    for name in COVERED:
        path = project.source / f"{name.replace('.', '/')}.py"
        source = path.read_text()
        path.write_text(f"{source}\nCHANGED = True\n")
        assert project.code().digest != before.digest, name
        path.write_text(source)
    project.write("gd_unrelated.py", "X = 2\n")
    project.write("gd_typing_only.py", "Name = int\n")
    assert project.code().digest == before.digest
    project.write("gd_shop/__init__.py", '"""The shop."""\n')
    assert project.code().digest == before.digest, "it does nothing"
    project.write("gd_shop/__init__.py", "import gd_sibling.rates\n\ngd_sibling.rates.RATE = 2\n")
    assert project.code().modules == (*COVERED[:2], "gd_shop", *COVERED[2:]), "it runs first"


BY_NAME = """
import builtins
import importlib
from importlib import import_module as load

from onceward import ConsumerTask
from onceward.inbox import Contract

class Bill(ConsumerTask):
    contract = Contract(consumer_id="billing", event_types=["order"], owner_team="shop",
                        idempotency_mechanism="one transaction")

    def process_transaction(self, transaction, session):
        {}
"""


@pytest.mark.req("CC-068")
@pytest.mark.parametrize(
    "call",
    [
        'importlib.import_module("gd_shop.rules")',
        'importlib.import_module(name="gd_shop.rules")',
        'importlib.import_module(".rules", "gd_shop")',
        'importlib.import_module(".rules", package="gd_shop")',
        'importlib.import_module("..rules", "gd_shop.deeper")',
        'importlib.import_module(".rules", __package__)',
        'importlib.import_module(name=".rules", package=__package__)',
        'load("gd_shop.rules")',
        '__import__("gd_shop.rules")',
        '__import__(name="gd_shop.rules")',
        'builtins.__import__("gd_shop", fromlist=["rules"])',
        '__import__("gd_shop", {}, {}, ["rules"])',
        '__import__("rules", globals(), locals(), [], 1)',
        '__import__("", globals(), fromlist=("rules",), level=1)',
    ],
)
def test_the_digest_covers_a_module_that_is_imported_by_a_name_in_the_code(
    project: Project, call: str
) -> None:
    project.write("gd_shop/consumer.py", BY_NAME.format(call))
    project.write("gd_shop/rules.py", "RULE = 1\n")
    assert project.code().modules == ("gd_shop.consumer", "gd_shop.rules")


@pytest.mark.parametrize(
    "call",
    [
        'importlib.import_module(".rules", transaction.payload)',
        'importlib.import_module(".." * 9 + "rules", "gd_shop")',
        'importlib.import_module("....rules", "gd_shop")',
        'importlib.import_module("...")',
        "importlib.import_module(*transaction.payload)",
        '__import__("gd_shop", *transaction.payload)',
        '__import__("gd_shop", level=transaction.payload, fromlist=[transaction.id])',
        "transaction.import_module(name=7)",
    ],
)
def test_a_name_that_is_computed_or_leads_nowhere_adds_nothing_to_the_digest(
    project: Project, call: str
) -> None:
    project.write("gd_shop/consumer.py", BY_NAME.format(call))
    project.write("gd_shop/rules.py", "RULE = 1\n")
    assert project.code().modules == ("gd_shop.consumer",)


SHOP = """
from onceward import Onceward
app = Onceward("shop", database="sqlite:///nowhere.db")
"""
RATES = """
from gd_app import app
from gd_sibling.rates import RATE

@app.service(outside=False)
def rates():
    return RATE
"""
BOOKS = """
from gd_app import app
from sqlalchemy.orm import Session

@app.service(per="message", outside=False)
def books(rates, session: Session):
    return lambda order: session.execute("INSERT INTO bills VALUES (:id)", order)
"""
HANDLER = """
from onceward import Contract
from gd_app import app

@app.consumer("memory://orders", contract=Contract(consumer_id="billing", event_types=["order"], owner_team="shop",
                                                   idempotency_mechanism="one transaction"))
def bill(order, books):
    books(order)
"""


@pytest.mark.req("CC-157")
def test_the_digest_covers_the_services_that_a_function_takes_and_those_that_they_take(
    project: Project,
) -> None:
    for name, source in (("app", SHOP), ("rates", RATES), ("books", BOOKS), ("handler", HANDLER)):
        project.write(f"gd_{name}.py", source)

    def code() -> Code:
        project.forget()
        importlib.invalidate_caches()
        for each in ("gd_rates", "gd_books", "gd_handler"):  # as the module that a run names does
            importlib.import_module(each)
        [consumer] = importlib.import_module("gd_app").app.consumers.values()
        return code_of(task_class(consumer), consumer.contract)

    before = code()
    assert before.modules == ("gd_app", "gd_books", "gd_handler", "gd_rates", "gd_sibling.rates")
    for name in ("books", "rates"):
        path = project.source / f"gd_{name}.py"
        path.write_text(f"{path.read_text()}\nCHANGED = True\n")
        assert code().digest != before.digest, name
        before = code()


@pytest.mark.req("CC-068")
def test_code_without_source_proves_nothing() -> None:
    made: Any = type("Made", (), {"__module__": "gd_nowhere", "contract": consumers.contract()})
    assert code_of(made, made.contract).sources == {}
    assert "its source cannot be read here" in str(lacking(made.contract, made, [proof(made)], "sqlite"))


@pytest.mark.req("CC-068", "CC-069")
def test_packages_count_with_their_version_and_content_and_so_does_what_they_require(
    project: Project,
) -> None:
    assert project.code().packages == ("gd-installed",)
    before = project.versions()
    assert [*before] == ["gd-installed", "gd-needed"]
    assert before["gd-needed"].startswith("2.0 (")
    project.install("gd_needed", "2.1", "X = 1\n")
    assert project.versions()["gd-needed"].startswith("2.1 (")
    project.install("gd_needed", "2.0", "X = 2\n")
    assert project.versions()["gd-needed"] != before["gd-needed"], "another content under the same version"
    project.install("gd_needed", "2.0", "X = 1\n")
    assert project.versions() == before
    project.install("gd_needed", "2.0", "X = 2\n", pure=False)
    assert project.versions()["gd-needed"] == "2.0", "compiled packages differ from machine to machine"
    project.install("gd_optional", "1.0", "")
    assert "gd-optional" in project.versions(), "it is used now"


def test_python_onceward_and_the_database_driver_count_always() -> None:
    on_sqlite, on_postgresql = versions_in_use((), "sqlite"), versions_in_use((), "postgresql")
    assert [*on_sqlite] == ["onceward", "python", "sqlalchemy"]
    assert on_sqlite["python"] == ".".join(map(str, sys.version_info[:2]))
    assert "psycopg" in on_postgresql


@pytest.mark.req("CC-069")
def test_what_was_source_in_ci_may_be_installed_where_it_runs(project: Project) -> None:
    """`pip install -e` there, `pip install` here: the same code."""
    in_ci = project.code()
    (project.source / "gd_sibling").rename(project.source / "away")
    project.install("gd_sibling", "1.0", "")
    (project.site / "gd_sibling" / "rates.py").write_text("RATE = 1\n")
    assert "gd_sibling.rates" not in project.code().modules
    bill = importlib.import_module("gd_shop.consumer").Bill
    assert code_of(bill, bill.contract, also=in_ci.modules).digest == in_ci.digest
    (project.site / "gd_sibling" / "rates.py").write_text("RATE = 2\n")
    project.forget()
    bill = importlib.import_module("gd_shop.consumer").Bill
    assert code_of(bill, bill.contract, also=in_ci.modules).digest != in_ci.digest


def test_the_digest_does_not_import_packages(project: Project) -> None:
    """A handler that imports a heavy package late must not pay for it at the start."""
    project.code()
    assert not [name for name in sys.modules if name.startswith("gd_installed")]


@pytest.mark.req("CC-068")
def test_consumers_that_start_at_once_read_their_code_at_once() -> None:
    """Until Python 3.13, `ast.parse` raises a SystemError if another thread parses while it is interrupted."""
    source = Path(__file__).read_bytes()

    def switch_threads(*_: Any) -> None:
        time.sleep(0)

    before = gc.get_threshold()
    gc.callbacks.append(switch_threads)
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(4) as threads:
            trees = list(threads.map(syntax_tree, [source] * 40))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(switch_threads)
    assert None not in trees


@pytest.mark.req("CC-088")
def test_each_module_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(modules, "_studies", {})
    monkeypatch.setattr(modules, "syntax_tree", lambda source: parsed.append(source) or syntax_tree(source))
    found = {
        code_of(consumer, consumer.contract).digest for consumer in (consumers.Right, consumers.AsyncRight)
    }
    assert len(found) == 1
    assert parsed
    assert len(parsed) == len(set(parsed))


def test_the_list_of_what_is_installed_is_read_again_only_after_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a fifth of a second. The working directory is on the path, and databases there come and go."""
    readings: list[None] = []

    def read() -> dict[str, list[str]]:
        readings.append(None)
        return {}

    spec = importlib.util.spec_from_file_location("gd_here", tmp_path / "gd_here.py")
    assert spec is not None
    (tmp_path / "gd-0.9.dist-info").mkdir()  # so no other test has asked for the same, or does
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(distributions, "packages_distributions", read)
    for change, expected in (("shop.db", 1), ("shop.db-wal", 1), ("gd-1.0.dist-info", 2), ("shop.db-shm", 2)):
        (tmp_path / change).mkdir()
        os.utime(tmp_path, (time.time(), time.time() + expected))
        assert distributions.distributions_of("gd_here", spec) == []
        assert len(readings) == expected, change

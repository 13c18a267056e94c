"""A connector from another package: built and installed from docs/how-to/write-a-connector.md, and used by its URL."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.integration.docs.page import blocks, pattern, squeezed
from tests.support import ROOT, commands

PAGE = (ROOT / "docs" / "how-to" / "write-a-connector.md").read_text("utf-8")
FOREIGN = ("ONCEWARD_", "OTEL_", "PYTEST_", "PYTHONUNBUFFERED")  # unbuffered prints of two consumers mix


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the page's package, installed by pip."""
    package = tmp_path_factory.mktemp("onceward-spool")
    for block in blocks(PAGE):
        if block.title is not None and block.title != "shop.py":
            file = package / block.title
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text, "utf-8")
    site = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    offline = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--target", str(site), str(package)]
    done = subprocess.run([*install, *offline], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return site


class Machine:
    """A working directory, and the packages that are installed there."""

    def __init__(self, directory: Path, *packages: Path) -> None:
        self.directory = directory
        self._packages = list(packages)

    def add(self, name: str, entry: str, code: str) -> None:
        """A package `name` without pip: only what an installed one needs."""
        place = self.directory / f"{name}-site"
        metadata = place / f"{name}-0.3.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3\n")
        (metadata / "entry_points.txt").write_text(f"[onceward.connectors]\n{entry}\n")
        (place / f"{name}.py").write_text(textwrap.dedent(code))
        self._packages.append(place)

    def app(self, *sources: str) -> None:
        consumers = [
            f"@app.consumer({source!r})\ndef consume{number}(order): ..."
            for number, source in enumerate(sources)
        ]
        code = ["from onceward import Onceward", "app = Onceward('shop')", *consumers]
        (self.directory / "shop.py").write_text("\n".join(code))

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """A command of a shell, without anything that only a shell can do if it is one of ours."""
        program, *arguments = shlex.split(command)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        environment |= {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, self._packages)),
            "NO_COLOR": "1",
        }
        if program == "onceward":
            return commands.onceward(*arguments, cwd=self.directory, env=environment)
        return subprocess.run(
            ["sh", "-c", command],
            cwd=self.directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def refusal(self, command: str) -> str:
        done = self.run(command)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def with_spool(tmp_path: Path, installed: Path) -> Machine:
    return Machine(tmp_path, installed)


# ── it works ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CN-02")
def test_the_package_of_the_page_runs_explains_and_balances_as_the_page_shows(with_spool: Machine) -> None:
    """Both in threads and in asyncio: the page has one consumer of each."""
    page = PAGE.replace("/var/spool", f"{with_spool.directory}/spool")
    [shop] = [block for block in blocks(page) if block.title == "shop.py"]
    (with_spool.directory / "shop.py").write_text(shop.text)
    [console] = [block for block in blocks(page) if block.language == "console"]
    commands = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", console.text, re.MULTILINE)
    assert commands.pop(0)[0] == "pip install ./onceward-spool"
    assert [command.split()[1] for command, _ in commands[2:]] == ["run", "explain", "balance"]
    for command, promised in commands:
        done = with_spool.run(command)
        reported = done.stdout if promised else ""
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.fullmatch(pattern(promised), squeezed(reported)), (
            f"$ {command}\n{reported}\nand not\n{promised}"
        )
    spool = with_spool.directory / "spool"
    assert {place.name: len(list((place / "done").iterdir())) for place in spool.iterdir()} == {
        "orders": 2,
        "mails": 1,
    }


@pytest.mark.req("CN-02")
def test_its_facts_and_its_settings_count_as_those_of_a_built_in_one(with_spool: Machine) -> None:
    with_spool.app("spool:///tmp/orders?sync=no")
    [reported] = json.loads(with_spool.run("onceward explain shop:app --json").stdout)
    assert (reported["guarantee"], reported["not_checked"]) == ("may lose", [])
    assert "sync=no" in reported["why"]
    for source, problem in {
        "spool://orders": "it names no directory",
        "spool:///tmp/orders?sync=maybe": "sync must be yes or no, not 'maybe'",
        "spool:///tmp/orders?lease=0": "lease must be a positive number",
        "spool:///tmp/orders?size=3": "spool has no setting 'size'; it has lease, max_deliveries, on_failure,",
    }.items():
        with_spool.app(source)
        assert problem in with_spool.refusal("onceward explain shop:app")
    nowhere = with_spool.refusal("onceward balance --source spool:///nowhere/at/all")
    assert "there is no directory /nowhere/at/all" in nowhere


@pytest.mark.req("CN-02")
def test_what_fails_too_often_is_dead_and_balances(with_spool: Machine) -> None:
    spool = with_spool.directory / "orders"
    (with_spool.directory / "shop.py").write_text(
        "from onceward import Onceward\n"
        "app = Onceward('shop')\n"
        f"@app.consumer('spool://{spool}?max_deliveries=2&redelivery_delay=0.01')\n"
        "def charge(order): raise OSError('no')\n"
        "@app.producer(charge)\n"
        "def place(): return 1\n"
    )
    assert with_spool.run('python -c "import shop; shop.app.produce(shop.place)"').returncode == 0
    for _ in range(3):
        with_spool.run("onceward run shop:app --drain")
    [struck] = json.loads(with_spool.run("onceward balance shop:app --json").stdout)
    assert (struck["appended"], struck["pending"], struck["dead"], struck["holds"]) == (1, 0, 1, True)


# ── minimal schemes ─────────────────────────────────────────────────────────────────────────────────────

QUIET = """
from onceward.connectors import MemoryConnector, Scheme

SCHEME = Scheme(names=("quiet",), open=lambda address, *, asynchronous: MemoryConnector())
"""


@pytest.mark.req("CN-03")
def test_what_a_connector_neither_says_nor_counts_is_unknown(machine: Machine) -> None:
    machine.add("quiet", "quiet = quiet:SCHEME", QUIET)
    machine.app("quiet://orders")
    done = machine.run("onceward balance shop:app")
    assert done.returncode == 3, done.stderr
    assert re.search(r"consume0( +\?){5}", done.stdout), done.stdout
    assert "the connector of quiet:// does not count" in done.stdout + done.stderr
    assert "Unknown whether it holds" in done.stdout + done.stderr
    reported = machine.run("onceward explain shop:app").stdout
    assert "unknown, at best at least once: no contract" in reported
    assert "how durable the source is: its connector does not report it" in reported


# ── broken, or duplicate ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CN-01")
def test_an_unknown_scheme_is_refused_with_all_that_are_known(machine: Machine) -> None:
    machine.add("quiet", "quiet = quiet:SCHEME", "raise RuntimeError('it is not needed')")
    machine.app("splool:///tmp/orders")
    known = (
        "sqlite", "redis", "rediss", "postgresql", "postgres", "nats", "tls", "boundary+http", "boundary+https",
        "memory", "quiet",
    )  # fmt: skip
    for command in ("explain", "balance", "run"):
        reported = " ".join(machine.refusal(f"onceward {command} shop:app").split())
        assert (
            f"is not a source; start its URL with one of {', '.join(f'{name}://' for name in known)}"
            in reported
        )


@pytest.mark.req("CN-01")
@pytest.mark.parametrize(
    ("entry", "code", "problem"),
    [
        (
            "broken:SCHEME",
            "import nonsense",
            "which cannot be loaded: ModuleNotFoundError: No module named 'nonsense'",
        ),
        ("broken:SCHEME", "1 / 0", "which cannot be loaded: ZeroDivisionError: division by zero"),
        ("broken:SCHEME", "", "which cannot be loaded: AttributeError"),
        ("broken:SCHEME", "SCHEME = {}", "where broken:SCHEME is a dict and not a Scheme"),
        (
            "broken:SCHEME",
            QUIET,
            "where broken:SCHEME is the scheme of quiet; the entry point must have one of these names",
        ),
    ],
)
def test_a_package_that_is_broken_is_named_and_stops_no_other_scheme(
    machine: Machine, entry: str, code: str, problem: str
) -> None:
    machine.add("broken", f"spool = {entry}", code)
    machine.add("quiet", "quiet = quiet:SCHEME", QUIET)
    machine.app("spool:///tmp/orders")
    reported = " ".join(machine.refusal("onceward explain shop:app").split())
    assert f"spool:// is offered by package broken 0.3, {problem}" in reported
    machine.app("quiet://orders", "sqlite:///orders.db")
    assert machine.run("onceward explain shop:app").returncode == 0


@pytest.mark.req("CN-01")
def test_two_packages_with_one_scheme_are_both_named(machine: Machine) -> None:
    machine.add("one", "quiet = one:SCHEME", QUIET)
    machine.add("other", "quiet = other:SCHEME", QUIET)
    machine.app("quiet://orders")
    reported = " ".join(machine.refusal("onceward explain shop:app").split())
    assert (
        "several installed packages offer quiet://: one 0.3, other 0.3; uninstall all but one of them"
        in reported
    )


@pytest.mark.req("CN-01")
def test_a_built_in_scheme_is_not_replaced_and_that_is_logged(machine: Machine) -> None:
    machine.add("thief", "sqlite = thief:SCHEME", QUIET.replace("quiet", "sqlite"))
    machine.add("quiet", "quiet = quiet:SCHEME", QUIET)
    machine.app("sqlite:///orders.db", "quiet://orders")
    done = machine.run("onceward explain shop:app --json")
    reported = json.loads(done.stdout)
    ours = ("written through to the disk", "is on tmpfs")  # where the temporary files are
    assert any(each in link["why"] for link in reported[0]["links"] for each in ours)
    assert "package thief 0.3 offers sqlite://, which is built in; its connector is not used" in done.stderr

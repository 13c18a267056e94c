"""No argument ends a command in a traceback of ours."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from onceward.boundary.bundle import LENGTH, MAGIC, Header
from onceward.boundary.model import ObjectRef
from onceward.cli import main
from tests.support.odd_arguments import DATABASE, NOWHERE, Call, call, calls, commands, fill, problem_with

STEP = 211
"""Of twelve thousand calls, one in so many: every command, and every value."""
LONG = "x" * 5000


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("odd") / "inbox.db"
    assert call(Call(("inbox", "migrate"), ("--database", f"sqlite:///{file}"))).exit_code == 0
    return file


@pytest.fixture
def folder(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    fill(tmp_path)
    shutil.copy(database, tmp_path)
    yield tmp_path
    for name in ("good", "bad", "broken"):
        sys.modules.pop(name, None)


@pytest.mark.req("ST-07")
@pytest.mark.parametrize("start", range(2))
def test_a_command_with_an_odd_argument_ends_with_a_line_and_a_code(folder: Path, start: int) -> None:
    sample = list(calls())[start * STEP // 2 :: STEP]
    problems = {each: problem for each in sample if (problem := problem_with(call(each)))}
    assert problems == {}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.req("ST-07")
@pytest.mark.parametrize("path", [path for path, _ in commands()], ids=" ".join)
def test_every_command_with_every_odd_argument(folder: Path, path: tuple[str, ...]) -> None:
    """All of them, in files that earlier calls of the command may have changed."""
    mine = [each for each in calls() if each.path == path]
    problems = {each: problem for each in mine if (problem := problem_with(call(each)))}
    assert problems == {}


@pytest.mark.req("ST-07")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("config", ".:."), 2, "'.:.' does not name an object in a module; write MODULE:NAME"),
        (("explain", ".:."), 2, "'.:.' does not name an object in a module; write MODULE:NAME"),
        (("run", ".:."), 2, "'.:.' does not name an object in a module; write MODULE:NAME"),
        (("verify", "..x:y"), 2, "'..x:y' does not name an object in a module; write MODULE:NAME"),
        (("balance", "a\0b:app"), 2, "does not name an object in a module; write MODULE:NAME"),
        (("config", "nats://u:SECRET@h"), 2, "nats://u:***@h is a URL; write MODULE:NAME"),
        (("verify", "redis://:SECRET@h/0"), 2, "redis://:***@h/0 is a URL; write MODULE:NAME"),
        (("config", "a..b:app"), 2, "does not name an object in a module; write MODULE:NAME"),
        (("trace", "/"), 2, "/ cannot be read: Is a directory; name a span file, or `last`"),
        (("trace", "/dev/zero"), 2, "/dev/zero cannot be read: it has more than 256 MiB; name a span file"),
        (("trace", "a\0b"), 2, "a\\x00b cannot be read: embedded null byte; name a span file, or `last`"),
        (("trace", LONG), 2, "cannot be read: File name too long; name a span file, or `last`"),
        (("boundary", "get", "files", LONG), 1, "cannot be written: File name too long; name another file"),
        (("boundary", "get", "files", "a\0b"), 1, "cannot be written: embedded null byte; name another file"),
        (
            ("boundary", "put", "files", "a", "a\0b"),
            2,
            "cannot be read: embedded null byte; name another file",
        ),
        (
            ("boundary", "export", LONG, "--store", "x", "--zone", "a", "--since", "0"),
            2,
            "cannot be written: File name too long",
        ),
        (("boundary", "import", LONG, "--zone", "a"), 2, "cannot be read: File name too long"),
        (
            ("boundary", "append", "--lines", "a\0b"),
            2,
            "cannot be read: embedded null byte; name another file",
        ),
        (("boundary", "copy", "--from", LONG, "--to", "x"), 2, "there is no boundary in"),
        (("boundary", "copy", "--from", "sqlite:///b?key=SECRET", "--to", "x"), 2, "'sqlite:///b?key=***'"),
        (("dlq", "export", LONG, "--database", DATABASE), 2, "cannot be written: File name too long"),
        (
            ("dlq", "list", "--limit", "9" * 30, "--database", DATABASE),
            2,
            "a number is too large for the database",
        ),
        (("consumers", "show", "\udc80", "--database", DATABASE), 2, "an argument is not UTF-8 text"),
        (("audit", "list", "--database", f"sqlite:///{LONG}"), 2, "cannot be opened: File name too long"),
        (("audit", "list", "--database", "sqlite:///\udc80"), 2, "an argument is not UTF-8 text"),
        (("dlq", "show", "\x1b[31m", "--database", DATABASE), 2, r"'\x1b[31m' should be a valid integer"),
        (("\x1b]0;t\x07",), 2, r"No such command '\x1b]0;t\x07'"),
        (
            ("inbox", "stats", "postgresql://u:hunter2@h/x", "--database", DATABASE),
            2,
            "postgresql://u:***@h/x",
        ),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(
    folder: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = call(Call((), arguments))
    assert problem_with(result) is None
    assert result.exit_code == code
    assert words in result.stderr


@pytest.mark.req("ST-07")
@pytest.mark.parametrize("bucket", ["a\0b", "../../outside", "/etc", "", "x" * 5000])
def test_a_bundle_with_a_name_that_no_bucket_has_imports_nothing_of_it(folder: Path, bucket: str) -> None:
    def part(kind: bytes, body: bytes) -> bytes:
        return kind + len(body).to_bytes(LENGTH, "big") + body

    ref = ObjectRef(bucket=bucket, key="k", digest=f"sha256:{'0' * 64}", size=1, media_type="")
    header = msgspec.json.encode(Header(zone="a", since=0, last=1))
    whole = MAGIC + part(b"H", header) + part(b"O", msgspec.json.encode(ref)) + b"x"
    (folder / "bundle").write_bytes(whole + hashlib.sha256(whole).digest())
    result = call(Call(("boundary", "import"), ("bundle", "--zone", "b", "--store", "facts")))
    assert problem_with(result) is None
    assert not list((folder / "facts" / "objects" / "names").iterdir())


# ── what nobody expected ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("ST-07")
def test_a_bug_of_ours_is_one_line_that_names_the_traceback_for_a_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr("onceward.app.settings.resolve", json.loads)  # raises, in code that is not the user's
    monkeypatch.setattr("sys.argv", ["onceward", "config", "--json"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    out, err = capsys.readouterr()
    (kept,) = folder.glob("onceward-*.txt")
    assert ended.value.code == 1
    assert len(err.splitlines()) == 1
    assert "onceward failed unexpectedly at config.py:" in err
    assert f"report it with the traceback in {kept}" in err
    assert json.loads(out)["error"] in err
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "Traceback" in kept.read_text()


@pytest.mark.req("ST-08")
@pytest.mark.parametrize("command", ["explain", "run"])
def test_a_bug_in_your_module_shows_your_traceback_and_nothing_of_ours(folder: Path, command: str) -> None:
    (folder / "broken.py").write_text("def f():\n    raise KeyError('\\x1b[31m')\nf()\n")
    ended = subprocess.run(
        [sys.executable, "-m", "onceward", command, "broken:app"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert 'broken.py", line 2, in f' in ended.stderr
    assert "cannot be imported: see above" in ended.stderr
    assert f"onceward{'/'}cli" not in ended.stderr
    assert "\x1b" not in ended.stderr


@pytest.mark.req("ST-08")
def test_code_of_yours_that_fails_later_is_shown_too(folder: Path) -> None:
    (folder / "bad.py").write_text(
        "from onceward import Onceward\napp = Onceward('shop')\n\n\ndef __getattr__(name):\n    return 1 / 0\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "onceward", "config", "bad:other"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert 'bad.py", line 6, in __getattr__' in ended.stderr
    assert ended.stderr.rstrip().endswith("your code failed: see above")
    assert "_imports.py" not in ended.stderr


@pytest.mark.req("ST-07")
def test_a_boundary_that_is_not_there_is_one_line(folder: Path) -> None:
    for command in (("stats",), ("consumers",), ("fetch", "--consumer", "a"), ("tail", "--consumer", "a")):
        result = call(Call(("boundary", *command), ("--url", NOWHERE)))
        assert (problem_with(result), result.exit_code) == (None, 1)


@pytest.mark.req("ST-07")
@pytest.mark.parametrize(
    "arguments",
    [
        ("audit", "list", "--database", "sqlite:///inbox.db?timeout=soon"),
        (
            "balance",
            "--source",
            "sqlite:///orders.db",
            "--consumer",
            "c",
            "--database",
            "sqlite:///inbox.db?timeout=x",
        ),
        ("boundary", "copy", "--from", "directory", "--to", "/proc/nothing/here"),
        ("boundary", "certs", "/proc/nothing/here", "--zone", "a"),
        ("new", "shop", "--dir", "/proc/nothing/here"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_place_or_an_option_that_cannot_be_used_is_refused(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    result = call(Call(arguments[:1], arguments[1:]))
    assert problem_with(result) is None
    assert result.exit_code in (1, 2)

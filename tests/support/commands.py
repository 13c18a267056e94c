"""Programs in real processes that start at once: each is forked from a process that has imported onceward already.

For tests of what a program prints and does. Those of what it imports, and of how it dies, start an interpreter. It is
also that process: `python -m tests.support.commands`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tests.support import ROOT

ONCEWARD = "onceward.cli.main:main"
PRELOADED = (
    "onceward.cli.main", "onceward.app", "onceward.inbox", "onceward.cli.output", "onceward.inspection",
    "onceward.task.mixins.consumer", "onceward.verify", "sqlalchemy.dialects.sqlite", "sqlalchemy.ext.asyncio",
    "rich.table",
)  # fmt: skip
_servers: list[subprocess.Popen[str]] = []


def onceward(*arguments: str, cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`onceward ARGUMENTS…`, in a directory and an environment."""
    return program(ONCEWARD, "onceward", *arguments, cwd=cwd, env=env)


def program(
    function: str, *argv: str, cwd: Path, env: Mapping[str, str], strict: bool = False
) -> subprocess.CompletedProcess[str]:
    """Call `module:function` as a program. `strict`: a warning is an error."""
    with tempfile.TemporaryDirectory() as folder:
        printed = {name: str(Path(folder) / name) for name in ("stdout", "stderr")}
        asked = {"function": function, "argv": argv, "cwd": str(cwd), "env": dict(env), "strict": strict}
        code = _ask({**asked, **printed})
        return subprocess.CompletedProcess(
            argv, code, *(Path(path).read_text("utf-8") for path in printed.values())
        )


def _ask(request: dict[str, Any]) -> int:
    if not _servers:
        _servers.append(_start())
    [server] = _servers
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())
    except BaseException:  # the test takes too long: the next one gets a new server
        _servers.clear()
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
        raise


@atexit.register
def _stop() -> None:
    for server in _servers:
        server.communicate(timeout=60)  # it ends with its input


def _start() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# ── the process that forks ──────────────────────────────────────────────────────────────────────────────


def _serve() -> None:
    for module in PRELOADED:
        import_module(module)
    gc.freeze()
    path = [each for each in sys.path if each not in ("", str(ROOT))]
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _end(_become(json.loads(line), path))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


def _become(request: dict[str, Any], path: list[str]) -> int:
    """Returns the exit code."""
    sys.stdin = open(os.devnull)  # noqa: SIM115
    os.dup2(sys.stdin.fileno(), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.modules["__main__"] = ModuleType("__main__")  # typer looks there for the name of the program
    sys.argv[:] = request["argv"]
    is_script = (
        request["function"] == ONCEWARD
    )  # which does not find modules in its directory; python -m does
    here = [] if is_script else [request["cwd"]]
    sys.path[:] = [*here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    if request["strict"]:
        warnings.simplefilter("error")
    module, _, function = request["function"].partition(":")
    try:
        getattr(import_module(module), function)()
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """As an interpreter does, but leave the memory to the operating system: taking it apart takes longer than most
    commands."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()

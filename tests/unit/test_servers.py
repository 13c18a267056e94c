"""Servers for tests start on a machine that has never started one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from onceward.testing import servers


def test_processes_that_start_together_create_their_user_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    users = tmp_path / "users"
    useradd = tmp_path / "useradd"
    useradd.write_text(f"#!/bin/sh\necho $3 >> {users}\n")
    useradd.chmod(0o755)

    def find(name: str) -> str:
        if not users.exists():
            raise KeyError(name)
        return name

    monkeypatch.setattr(servers, "getpwnam", find)
    monkeypatch.setenv("PATH", str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(servers.ensure_user, ["server"] * 8))
    assert users.read_text() == "server\n"


def test_useradd_need_not_be_in_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[dict[str, str]] = []
    monkeypatch.setattr(servers.subprocess, "run", lambda command, env, **_: called.append(env))
    monkeypatch.setenv("PATH", str(tmp_path))
    servers.ensure_user("nobody has this name")
    assert called[0]["PATH"].split(":")[1:] == ["/usr/sbin", "/sbin"]

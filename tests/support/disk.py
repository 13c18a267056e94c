"""A machine whose files are all on a disk, also where the directory for temporary files is in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from onceward.connectors import file_place


@pytest.fixture
def disk(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    mounts = tmp_path_factory.mktemp("mounts") / "mountinfo"
    mounts.write_text("1 0 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n")
    monkeypatch.setattr(file_place, "MOUNTS", mounts)
    return mounts

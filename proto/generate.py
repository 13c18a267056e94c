"""Writes src/onceward/boundary/v1 from boundary.proto. With `--check`, only checks whether it is up to date."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = Path("onceward/boundary/v1")
TARGET = HERE.parent / "src" / PACKAGE
TEMPLATE = {
    "version": "v2",
    "plugins": [{"local": "protoc-gen-py", "out": "."}, {"local": "protoc-gen-connectrpc", "out": "."}],
}


def generate(directory: Path) -> list[Path]:
    """Generate the modules in a separate directory, because the generator also writes their parent packages."""
    scripts = sysconfig.get_path("scripts")
    subprocess.run(
        [Path(scripts) / "buf", "generate", "--template", json.dumps(TEMPLATE), "--output", directory, HERE],
        check=True,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"},
    )
    return sorted((directory / PACKAGE).glob("boundary_*.py"))


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        modules = generate(Path(directory))
        if "--check" not in sys.argv:
            for module in modules:
                shutil.copy(module, TARGET)
            return 0
        stale = [each.name for each in modules if not _same(each, TARGET / each.name)]
    if stale:
        print(f"{', '.join(stale)} in {PACKAGE} out of date; run `make proto` and commit it")
    return 1 if stale else 0


def _same(one: Path, other: Path) -> bool:
    return other.exists() and filecmp.cmp(one, other, shallow=False)


if __name__ == "__main__":
    sys.exit(main())

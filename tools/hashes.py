"""Writes constraints.hashed.txt: the pinned versions with the SHA-256 of the files that pip chooses on this machine.

    python tools/hashes.py            asks the index that pip is configured for; the file names none

To install nothing but these files, on the platform that its first lines name:

    pip install --require-hashes -r constraints.hashed.txt
    pip install --no-deps .
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "constraints.hashed.txt"


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run(
            [*pip, "--report", report, "-c", ROOT / "constraints.txt", f"{ROOT}[test]"], check=True, cwd=ROOT
        )
        TARGET.write_text(as_text(json.loads(report.read_text())))


def as_text(report: dict[str, list[dict[str, dict[str, dict[str, dict[str, str]]]]]]) -> str:
    """Return the file for a report of `pip install --report`."""
    lines = [
        f"{each['metadata']['name']}=={each['metadata']['version']}"
        f" --hash=sha256:{each['download_info']['archive_info']['hashes']['sha256']}"
        for each in report["install"]
        if "archive_info" in each["download_info"]  # not onceward itself, which is a directory
    ]
    where = f"{platform.system()} {platform.machine()}, Python {sys.version_info[0]}.{sys.version_info[1]}"
    heading = [
        "# constraints.txt with the SHA-256 of every file. Written by tools/hashes.py; do not edit.",
        f"# For {where}. Other platforms install other files, which pip refuses.",
    ]
    return "\n".join([*heading, *sorted(lines, key=str.lower)]) + "\n"


if __name__ == "__main__":
    main()

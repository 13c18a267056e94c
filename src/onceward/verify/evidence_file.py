"""The file of `onceward verify --out`: checked before the scenarios run, written after."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onceward._text import quantity
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.verify.report import VerificationReport

SIGNING_KEY = "ONCEWARD_SIGNING_KEY"


class EvidenceOutput:
    def __init__(self, path: Path, key: str | None) -> None:
        from onceward.inbox.evidence.file import is_evidence
        from onceward.inbox.evidence.keys import signing_key

        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ConfigurationError(
                f"--out {path} cannot be written: it is a directory"
                if path.is_dir()
                else f"--out {path} cannot be written: directory {path.parent} does not exist"
            )
        if path.is_file() and not is_evidence(path):
            raise ConfigurationError(f"--out {path} is a file of another kind; name another file")
        self._path = path
        given = key or os.environ.get(SIGNING_KEY, "").strip()
        self._key = signing_key(given, "--sign-key" if key else SIGNING_KEY) if given else None

    def write(self, reports: Sequence[VerificationReport]) -> str:
        """Write the evidence of these reports if all of them prove their consumer. Returns what to print."""
        from onceward.inbox.evidence.file import write_evidence
        from onceward.inbox.evidence.keys import key_id, public_line

        unproven = [each.consumer_id for each in reports if not each.proves]
        if unproven:
            return f"{self._path} is not written: {', '.join(unproven)} not proven."
        write_evidence(self._path, [each.evidence() for each in reports], self._key)
        proven = f"Wrote the evidence of {quantity(len(reports), 'consumer')} to {self._path}"
        if self._key is None:
            return f"{proven}, unsigned. Sign it with --sign-key FILE or {SIGNING_KEY}."
        return (
            f"{proven}, signed by key {key_id(self._key.public_key())}. To trust it where it runs: "
            f"ONCEWARD_EVIDENCE_KEYS={public_line(self._key)}"
        )

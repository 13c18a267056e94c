"""Evidence as a file: from CI, where consumers are verified, to where they run.

    {"format": "onceward evidence 1", "evidence": […], "signature": {"key": "…", "ed25519": "…"}}

The signature covers the format and the evidence in canonical form, so layout and order of names do not matter and
everything else does.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from onceward._files.private import NewFile
from onceward.errors import ConfigurationError
from onceward.inbox.evidence.evidence import Evidence
from onceward.inbox.evidence.keys import key_id, trusted_keys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FORMAT: Final = "onceward evidence 1"
_AGAIN = "write it again with `onceward verify --all --out FILE`"


class EvidenceSettings(msgspec.Struct, frozen=True):
    """Where the evidence of a run is, and whom to trust."""

    given: str | None = None
    """A path, or the JSON itself."""
    keys: str | None = None
    """Trusted public keys."""
    unsigned: bool = False

    @classmethod
    def from_environment(cls) -> EvidenceSettings:
        """As a run without an app has them."""
        given, keys, unsigned = (os.environ.get(name, "").strip() for name in VARIABLES)
        if unsigned.lower() not in ("", *_YES, *_NO):
            raise ConfigurationError(f"{VARIABLES[2]} must be true or false, not {unsigned!r}")
        return cls(given or None, keys or None, unsigned.lower() in _YES)

    @property
    def place(self) -> str:
        """Where the evidence is, for messages."""
        if self.given is None or _is_json(self.given):
            return VARIABLES[0]
        return self.given


NO_FILE: Final = EvidenceSettings()
VARIABLES: Final = ("ONCEWARD_EVIDENCE", "ONCEWARD_EVIDENCE_KEYS", "ONCEWARD_EVIDENCE_UNSIGNED")
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def write_evidence(path: Path, found: Iterable[Evidence], key: Ed25519PrivateKey | None) -> None:
    """Write a file with all this evidence, signed if there is a key. It is complete, or not there."""
    now = time.time()
    dated = [msgspec.structs.replace(each, recorded_at=each.recorded_at or now) for each in found]
    content: dict[str, Any] = {"format": FORMAT, "evidence": msgspec.to_builtins(dated)}
    if key is not None:
        signature = base64.b64encode(key.sign(_signed_bytes(content))).decode()
        content["signature"] = {"key": key_id(key.public_key()), "ed25519": signature}
    with NewFile(
        path, replace=True, public=True
    ) as file:  # it is read where the code runs, perhaps by another user
        file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")


def is_evidence(path: Path) -> bool:
    """Whether an older file of evidence, complete or not, is there, or an empty one; anything else is not ours."""
    with path.open("rb") as file:
        head = file.read(200)
    return not head or b"onceward evidence" in head


def read_evidence_file(settings: EvidenceSettings) -> list[Evidence]:
    """Return its evidence, newest first; raise ConfigurationError unless all of it can be trusted."""
    if settings.given is None:
        return []
    place = f"the evidence in {settings.place}"
    content = _parse(_text_of(settings.given, place), place)
    _check_trust(content, settings, place)
    try:
        found = msgspec.convert(content["evidence"], type=list[Evidence])
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{place} is not complete: {error}; {_AGAIN}") from None
    return sorted(found, key=lambda each: each.recorded_at, reverse=True)


def _check_trust(content: dict[str, Any], settings: EvidenceSettings, place: str) -> None:
    signature = content.get("signature")
    if settings.keys is None:
        if settings.unsigned and signature is not None:
            named = _signature(signature, place)[0]
            raise ConfigurationError(
                f"{place} is signed by key {named[:16]}, and nothing checks that: evidence_unsigned is for files "
                "without a signature. Remove it and set evidence_keys (ONCEWARD_EVIDENCE_KEYS) to the public key, or "
                "write the file without --sign-key and ONCEWARD_SIGNING_KEY"
            )
        if settings.unsigned:
            return
        raise ConfigurationError(
            f"{place} cannot be trusted: no public key is set; set evidence_keys (ONCEWARD_EVIDENCE_KEYS), or, if you "
            "trust the image as it is, evidence_unsigned = true (ONCEWARD_EVIDENCE_UNSIGNED=true)"
        )
    if settings.unsigned:
        raise ConfigurationError(
            "evidence_keys and evidence_unsigned contradict each other; remove one of them"
        )
    keys = trusted_keys(settings.keys, "evidence_keys")
    if signature is None:
        raise ConfigurationError(
            f"{place} is not signed, but evidence_keys demands it; sign it with --sign-key of `onceward verify`, or "
            "ONCEWARD_SIGNING_KEY"
        )
    named, text = _signature(signature, place)
    if named not in keys:
        raise ConfigurationError(
            f"{place} is signed by key {named[:16]}, which is not trusted; evidence_keys has {', '.join(keys)}"
        )
    from cryptography.exceptions import InvalidSignature

    try:
        keys[named].verify(text, _signed_bytes(content))
    except InvalidSignature:
        raise ConfigurationError(
            f"{place} was altered after it was signed: its signature does not match; {_AGAIN}"
        ) from None


def _signature(given: Any, place: str) -> tuple[str, bytes]:
    try:
        return str(given["key"]), base64.b64decode(given["ed25519"], validate=True)
    except (TypeError, KeyError, ValueError, binascii.Error):
        raise ConfigurationError(f"{place} has a signature that cannot be read; {_AGAIN}") from None


def _signed_bytes(content: dict[str, Any]) -> bytes:
    """Everything but the signature, in canonical form."""
    covered = {name: value for name, value in content.items() if name != "signature"}
    return msgspec.json.encode(covered, order="sorted")


def _parse(text: bytes, place: str) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{place} is not JSON, or cut short: {error}; {_AGAIN}") from None
    if (twice := _repeated_name(text)) is not None:
        raise ConfigurationError(f"{place} has {twice!r} twice in one object; {_AGAIN}")
    if not isinstance(content, dict) or content.get("format") != FORMAT or "evidence" not in content:
        raise ConfigurationError(
            f"{place} is not a file of `onceward verify --out` (format {FORMAT!r}); {_AGAIN}"
        )
    return content


def _repeated_name(text: bytes) -> str | None:
    """A name that an object has twice: the signature would cover only the last one."""
    repeated: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        repeated.extend(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)

    json.loads(text, object_pairs_hook=note)
    return repeated[0] if repeated else None


def _text_of(given: str, place: str) -> bytes:
    if _is_json(given):
        return given.encode(errors="surrogateescape")  # as it came from the command line
    try:
        return Path(given).read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"{place} cannot be read: {why}; write the path of a file from `onceward verify --all --out FILE`, seen "
            f"from {Path.cwd()}, or the JSON itself"
        ) from None


def _is_json(given: str) -> bool:
    return given.lstrip().startswith("{")

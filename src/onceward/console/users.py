"""Users of the console in a file: a name, a role and a hash of the password on each line.

    ann:operator:scrypt$16384$8$1$SALT$HASH

Only the owner of the file can read it. A session is signed with the user's line, so a changed password, role or a
removed user ends it, and it outlives a restart of the server.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import threading
import time
from base64 import b64decode, b64encode
from pathlib import Path
from typing import NamedTuple

from onceward._files.private import open_new
from onceward.console.access import Role, User
from onceward.errors import ConfigurationError

COST, BLOCK, PARALLEL = 16384, 8, 1
SHORTEST = 12
"""Characters of a password."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
SESSION_SECONDS = 12 * 3600.0
AT_ONCE = threading.BoundedSemaphore(2)
"""Hashing takes memory on purpose: not more than so many at a time."""


class UserLine(NamedTuple):
    user: User
    secret: str

    def __str__(self) -> str:
        return f"{self.user.name}:{self.user.role.name.lower()}:{self.secret}"


class UsersFile:
    """Reads the file for every request that needs it: a change counts at once."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def lines(self) -> dict[str, UserLine]:
        try:
            text = self.path.read_text("utf-8")
        except FileNotFoundError:
            raise ConfigurationError(
                f"there is no users file {self.path}; add a user with `onceward console --add-user NAME "
                f"--users {self.path}`"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the users file {self.path} cannot be read: {error}") from None
        found = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            parts = line.strip().split(":")
            if (
                len(parts) != 3
                or parts[1].upper() not in Role.__members__
                or not parts[2].startswith("scrypt$")
            ):
                raise ConfigurationError(
                    f"line {number} of {self.path} must be NAME:ROLE:HASH, as --add-user writes it"
                )
            found[parts[0]] = UserLine(User(parts[0], Role[parts[1].upper()]), parts[2])
        return found

    def add(self, name: str, password: str, role: Role) -> None:
        """Add a user, or give one another password and role."""
        if NAME.fullmatch(name) is None:
            raise ConfigurationError(
                f"a user's name has up to 64 letters, digits and . _ @ -, and begins with a letter or digit; {name!r} "
                "does not"
            )
        if len(password) < SHORTEST:
            raise ConfigurationError(f"a password has {SHORTEST} characters or more")
        lines = self.lines() if self.path.exists() else {}
        lines[name] = UserLine(User(name, role), hash_of(password))
        fresh = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}")
        with open_new(fresh) as file:
            file.write("".join(f"{each}\n" for each in lines.values()).encode())
        os.replace(fresh, self.path)

    def check(self, name: str, password: str) -> User | None:
        """Return the user whose password this is. Takes as long for a name that does not exist."""
        line = self.lines().get(name)
        with AT_ONCE:
            is_right = matches(password, line.secret if line is not None else _NOBODY)
        return line.user if line is not None and is_right else None

    # ── sessions ────────────────────────────────────────────────────────────────────────────────────────

    def session(self, user: User, now: float | None = None) -> str:
        """Return what the browser keeps."""
        expires = int((time.time() if now is None else now) + SESSION_SECONDS)
        text = f"{user.name}|{secrets.token_hex(8)}|{expires}"
        return f"{text}|{self._sign(text, self.lines()[user.name])}"

    def user_of(self, session: str, now: float | None = None) -> User | None:
        """Return whose session it is; None if it has expired, is forged, or the user's line has changed."""
        text, _, signature = session.rpartition("|")
        name, _, rest = text.partition("|")
        expires = rest.rpartition("|")[2]
        line = self.lines().get(name)
        if (
            line is None
            or not session.isascii()
            or not hmac.compare_digest(signature, self._sign(text, line))
        ):
            return None
        return line.user if int(expires) >= (time.time() if now is None else now) else None

    @staticmethod
    def _sign(text: str, line: UserLine) -> str:
        return hmac.new(hashlib.sha256(str(line).encode()).digest(), text.encode(), "sha256").hexdigest()


def hash_of(password: str) -> str:
    salt = secrets.token_bytes(16)
    return _record(salt, _scrypt(password, salt, COST, BLOCK, PARALLEL))


def matches(password: str, secret: str) -> bool:
    try:
        _, cost, block, parallel, salt, expected = secret.split("$")
        found = _scrypt(password, b64decode(salt), int(cost), int(block), int(parallel))
        return hmac.compare_digest(found, b64decode(expected))
    except ValueError:
        return False


def _scrypt(password: str, salt: bytes, cost: int, block: int, parallel: int) -> bytes:
    return hashlib.scrypt(
        password.encode(), salt=salt, n=cost, r=block, p=parallel, maxmem=256 * cost * block, dklen=32
    )


def _record(salt: bytes, digest: bytes) -> str:
    return f"scrypt${COST}${BLOCK}${PARALLEL}${b64encode(salt).decode()}${b64encode(digest).decode()}"


_NOBODY = _record(bytes(16), bytes(32))

"""The address that a server listens on."""

from __future__ import annotations

import ipaddress
import socket

from onceward.errors import ConfigurationError


def parse_address(listen: str, name: str = "--listen") -> tuple[str, int]:
    """Split HOST:PORT. Port 0 takes a free one."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"{name} must be HOST:PORT, such as 127.0.0.1:7700, not {listen!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def free_address(host: str, port: int) -> str:
    """Return the IP address of `host`. Raise `ConfigurationError` if it is not of this machine or the port is in use:
    the server itself would report this late, and in its own words."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another address, or port 0 for a free "
            "one"
        ) from error
    return str(address[0])


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an IP address. Not for names: they have many spellings, such as 127.1."""
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback

"""What the URL of a queue names: `postgresql://user@host/database/orders`, or `postgresql://host/database?queue=orders`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onceward._secrets import remember
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

    from onceward.connectors.urls import Address

CONNECTION_SETTINGS = (
    "host", "port", "user", "password", "passfile", "service", "options", "application_name", "connect_timeout",
    "target_session_attrs", "sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "channel_binding",
    "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout",
)  # fmt: skip
"""Settings of a URL that go to the driver, by the names of libpq."""
LONGEST_NAME = 200
EXAMPLE = "write postgresql://user@host/database/orders, or postgresql://host/database?queue=orders"


def check(address: Address) -> None:
    database, *more = address.path.strip("/").split("/")
    given = address.settings.get("queue")
    if not database:
        address.refuse(f"it names no database and no queue; {EXAMPLE}")
    if not more and given is None:
        address.refuse(f"it names database {database!r} and no queue in it; {EXAMPLE}")
    if more and given is not None:
        address.refuse("it names its queue twice, in the path and as queue=…; remove one of them")
    if len(more) > 1 or (more and not more[0]):
        address.refuse(
            f"its path has more than a database and a queue; {EXAMPLE}, where the name may have a /"
        )
    _, queue = parts_of(address)
    if len(queue) > LONGEST_NAME or not queue.isprintable():
        address.refuse(f"the name of its queue must have 1 to {LONGEST_NAME} printable characters")


def parts_of(address: Address) -> tuple[str, str]:
    """Return the names of the database and the queue."""
    database, _, queue = address.path.strip("/").partition("/")
    return database, address.settings.get("queue") or queue


def identity_of(address: Address) -> str:
    """What the URL names, however it is spelled and whichever role connects."""
    database, queue = parts_of(address)
    host = address.settings.get("host") or address.hostname or "localhost"
    port = address.settings.get("port") or address.port or 5432
    return f"postgresql://{host}:{port}/{database}/{queue}"


def database_of(url: str | URL) -> URL:
    """Return the URL of the database, for the driver that this connector uses."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    if isinstance(url, str):
        remember(url)
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # its text may quote a password
        parsed = None
    if parsed is None or parsed.get_backend_name() not in ("postgresql", "postgres") or not parsed.database:
        raise ConfigurationError(
            "a PostgreSQL queue needs the URL of its database, such as postgresql://user@host/database; write / ? # @ "
            "in a password as %2F %3F %23 %40"
        )
    return parsed.set(drivername="postgresql+psycopg")


def connection_of(address: Address) -> URL:
    """Return the URL of its database."""
    from sqlalchemy.engine import make_url

    database, _ = parts_of(address)
    query = {name: value for name, value in address.settings.items() if name in CONNECTION_SETTINGS}
    server = make_url(f"postgresql+psycopg://{address.netloc}")
    return server.set(database=database, query=query)

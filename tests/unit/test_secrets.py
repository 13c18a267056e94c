"""A password is never shown, wherever it stands in a URL, and the rest of the URL stays readable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onceward import _secrets
from onceward._secrets import mask, mask_url, names_secret, remember
from onceward._text import driver_message
from onceward.telemetry.redaction import redact

SECRET = "hUnt3rTwo"

SERVERS = ("redis", "rediss", "postgresql", "postgresql+psycopg", "postgres", "nats", "amqp", "mysql+pymysql")
WEB = ("http", "https", "boundary+http", "boundary+https")
NAMES = (
    "password",
    "PASSWORD",
    "passwd",
    "pwd",
    "sslpassword",
    "sslkey",
    "token",
    "api_key",
    "secret",
    "pass%77ord",
)
VARIABLES = (
    "ONCEWARD_BROKER_TOKEN",
    "PGPASSWORD",
    "ONCEWARD_X_SECRET",
    "AWS_SECRET_ACCESS_KEY",
    "db.password",
)

texts = st.text(st.sampled_from("aZ09%@:/?#&=;,.'\"\\ []{}()<>+-_~$*|é漢🙂\t\x1b\u202e"), max_size=8)
raw = texts.filter(lambda each: not re.fullmatch(r"\d*", each))


@pytest.mark.req("CC-147")
@pytest.mark.parametrize(
    "url",
    [
        "nats://h/ORDERS?creds=/etc/billing-2/production_user.creds",
        "postgresql://h/db?sslkey=/etc/billing-2/production_user.key",
        "host=h passfile=/etc/billing-2/production_user",
    ],
)
def test_words_of_a_path_are_not_secrets(url: str) -> None:
    assert "billing-2" not in mask_url(url)
    remember(url)
    assert mask("billing-2 of production_user") == "billing-2 of production_user"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What one test remembers must not hide what another shows."""
    yield
    _secrets._known.clear()
    _secrets._known_pattern = None


@pytest.mark.req("ST-05")
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://u:{SECRET}@h/orders?group=g", "redis://u:***@h/orders?group=g"),
        (f"redis://:{SECRET}@h:6379/0/orders", "redis://:***@h:6379/0/orders"),
        (f"redis://:a@{SECRET}@h/orders", "redis://:***@h/orders"),
        (f"redis://u:a/{SECRET}@h/orders", "redis://u:***@h/orders"),
        (f"redis://u:a?{SECRET}@h/orders?group=g", "redis://u:***@h/orders?group=g"),
        (f"redis://u:a#{SECRET}@h/orders", "redis://u:***@h/orders"),
        (f"redis+unix://:{SECRET}@/run/redis.sock", "redis+unix://:***@/run/redis.sock"),
        (f"redis://u:{SECRET}", "redis://u:***"),
        (f"postgresql+psycopg://u:{SECRET}@h/db", "postgresql+psycopg://u:***@h/db"),
        (f"postgresql://u:{SECRET}@one,two:5433/db", "postgresql://u:***@one,two:5433/db"),
        (
            f"postgresql:///db?host=/run&password={SECRET}&user=u",
            "postgresql:///db?host=/run&password=***&user=u",
        ),
        (f"postgresql:///db?password=a&{SECRET}&user=u", "postgresql:///db?password=***&***&user=u"),
        (f"POSTGRESQL://u:{SECRET}@h/db", "POSTGRESQL://u:***@h/db"),
        (f"postgresql:/u:{SECRET}@h/db", "postgresql:***@h/db"),
        (f"postgresql//u:{SECRET}@h/db", "postgresql//u:***@h/db"),
        (f"postgresql//u:a/{SECRET}@h/db", "postgresql//u:***@h/db"),
        ("/srv/a:b@c.db", "/srv/a:b@c.db"),
        (f"sqlite://u:{SECRET}@h/db", "sqlite://u:***@h/db"),
        (f"nats://{SECRET}@h:4222", "nats://***@h:4222"),
        (f"nats://u:{SECRET}@a:1,nats://v:{SECRET}@b:2", "nats://u:***@a:1,nats://v:***@b:2"),
        (f"nats://u:x,nats://{SECRET}@a:1", "nats://u:***@a:1"),
        (f"http://u:80/{SECRET}@h:80/orders", "http://u:***@h:80/orders"),
        (f"u:{SECRET}@h:80", "u:***@h:80"),
        (f"sqlite:///x.db?key={SECRET}&timeout=3", "sqlite:///x.db?key=***&timeout=3"),
        (f"https://h/x?hex%6bey={SECRET}&a=1", "https://h/x?hex%6bey=***&a=1"),
        (f"x://h?token={SECRET}&a=1", "x://h?token=***&a=1"),
        (f"jdbc:x://h;user=u;password={SECRET};a=1", "jdbc:x://h;user=u;password=***;a=1"),
        (f"host=h password={SECRET} user=u", "host=h password=*** user=u"),
        (f"host=h password = 'a \\' {SECRET}' user=u", "host=h password = *** user=u"),
    ],
)
def test_a_password_is_hidden_and_the_rest_is_readable(url: str, shown: str) -> None:
    assert mask_url(url) == shown
    assert mask(shown) == shown


@pytest.mark.req("ST-05")
def test_a_path_of_the_web_is_readable_in_a_message() -> None:
    url = f"http://u:{SECRET}@h:80/users/ann@example.com"
    assert mask(f"{url} refused") == "http://u:***@h:80/users/ann@example.com refused"


@pytest.mark.req("ST-05")
@pytest.mark.parametrize(
    "harmless",
    [
        "production",
        "/var/lib/a:b@c",
        "sqlite:///me@home:1.db",
        "memory://a:b@c",
        "redis://user@h/orders?group=a@b",
        "redis://localhost:6379/0/orders?group=a@b",
        "redis://[::1]:6379/0/orders",
        "nats://one:4222,two:4222?name=x&replicas=3",
        "https://h:8443/users/ann@example.com?page=2",
        "nats://h/ORDERS?ca=/a&cert=/b&key=c/client.pem",
        "boundary+https://h:1?ca=/a&cert=/b&key=/c&consumer=x",
        "tests passed=3, tokens=5, bypass=1, author=ann",
        "write password=None, or token='' to have none",
        "password must not be empty",
        "write http://HOST:PORT or nats://host:port",
    ],
)
def test_what_holds_no_password_stays_as_it_is(harmless: str) -> None:
    assert mask(harmless) == harmless
    if "HOST" not in harmless and "8443/users" not in harmless:
        assert mask_url(harmless) == harmless


@pytest.mark.req("ST-05")
@given(st.sampled_from(SERVERS + WEB), texts, texts)
def test_an_escaped_password_is_replaced_and_nothing_else(scheme: str, before: str, after: str) -> None:
    password = quote(f"{before}{SECRET}{after}", safe="")
    rest = "@h.example:6379/0/orders?group=g&lease=30"
    assert mask_url(f"{scheme}://ann:{password}{rest}") == f"{scheme}://ann:***{rest}"
    assert mask(f"cannot open {scheme}://ann:{password}{rest}: refused") == (
        f"cannot open {scheme}://ann:***{rest}: refused"
    )


@pytest.mark.req("ST-05")
@given(st.sampled_from(SERVERS + WEB), texts, texts)
@example("redis", "12/", "")
@example("http", "80/", "")
@example("boundary+https", "443#", "/")
@example("postgresql", "5432?", "")
def test_a_password_that_is_not_escaped_is_hidden_too(scheme: str, before: str, after: str) -> None:
    assert SECRET not in mask_url(f"{scheme}://ann:{before}{SECRET}{after}@h:6379/orders?group=g")


@pytest.mark.req("ST-05")
@given(st.sampled_from(SERVERS + WEB), texts, texts)
def test_a_message_does_not_show_it_either_once_the_url_was_opened(
    scheme: str, before: str, after: str
) -> None:
    _secrets._known.clear()
    url = f"{scheme}://ann:{before}{SECRET}{after}@h:6379/orders?group=g"
    remember(url)
    assert SECRET not in mask(f"cannot open {url!r}: Invalid port")
    assert SECRET not in mask(f"cannot open {url}: Invalid port")


@pytest.mark.req("ST-05")
@given(st.sampled_from(SERVERS + WEB + ("sqlite",)), st.sampled_from(NAMES), texts, texts)
def test_a_password_among_the_settings_is_hidden(scheme: str, name: str, before: str, after: str) -> None:
    value = quote(f"{before}{SECRET}{after}", safe="")
    url = f"{scheme}://h/x?a=1&{name}={value}&b=2"
    assert mask_url(url) == f"{scheme}://h/x?a=1&{name}=***&b=2"
    assert mask(f"{url} is refused") == f"{scheme}://h/x?a=1&{name}=***&b=2 is refused"


@pytest.mark.req("ST-05")
@given(st.sampled_from(SERVERS + WEB), raw, raw)
def test_a_driver_that_quotes_a_part_of_a_url_does_not_show_its_password(
    scheme: str, before: str, after: str
) -> None:
    _secrets._known.clear()
    password = f"{before}@{SECRET}@{after}"
    remember(f"{scheme}://ann:{quote(password, safe='')}@h/db")
    for quoted in (password, f"{SECRET}@{after}", repr(password), quote(password, safe="")):
        assert SECRET not in redact(f"failed to resolve host {quoted}: unknown")
        assert SECRET not in driver_message(OSError(f"invalid port: {quoted}\nmore"))


@pytest.mark.req("ST-05")
@pytest.mark.parametrize("common", ["password", "postgres", "orders", "123456789", "u"])
def test_a_password_that_is_a_common_word_does_not_hide_that_word_elsewhere(common: str) -> None:
    remember(f"postgresql://u:{common}@h/db")
    assert mask(f"the {common} of user u failed") == f"the {common} of user u failed"


@pytest.mark.req("ST-05")
def test_names_of_variables_tell_what_is_secret() -> None:
    assert all(map(names_secret, VARIABLES))
    assert not any(map(names_secret, ("ONCEWARD_DATABASE", "grace", "passed", "evidence_keys", "author")))


@pytest.mark.req("ST-05")
def test_masking_takes_no_longer_than_reading() -> None:
    """These took minutes with patterns that try every start."""
    for text in (
        "token " + "a" * 200_000,
        "token://" + "a." * 100_000,
        "x" * 200_000 + "://",
        "pwd" + " " * 200_000,
    ):
        mask(text)
        mask_url(text)

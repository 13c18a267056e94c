"""A server's configuration: the meaning of each key; every mistake is reported with file, table and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from onceward.boundary.server.access import Peer
from onceward.boundary.server.config import Config, read_config
from onceward.boundary.settings import BoundarySettings
from onceward.boundary.tls import Tls
from onceward.errors import ConfigurationError

WHOLE = """
zone = "plant-a"
listen = "0.0.0.0:7700"
store = "postgresql://boundary@db/boundary"
strict_consumers = true
require_artifacts = true

[tls]
ca = "certs/ca.pem"
cert = "certs/plant-a.pem"
key = "/etc/boundary/plant-a.key"

[retention]
operational = "12h"
audit = "3650d"
documents = "1.5h"

[buffer]
capacity = "10GB"
threshold = 0.9
when_full = "drop_oldest"
safety = false

[quotas]
consumers = 20
labels = 10
objects = 500
object_bytes = "2GiB"

[[peers]]
identity = "hq-bsfg"
zone = "hq"
from_zones = ["hq", "plant-b"]
to_zones = ["plant-a"]
consumers = ["hq-receiver"]

[[peers]]
identity = "reader"
zone = "lab"

[[links]]
name = "from-hq"
url = "https://hq.example:7700"
consumer = "plant-a-receiver"
from_zones = ["hq"]
to_zones = ["plant-a"]
"""
TLS = '[tls]\nca = "a"\ncert = "b"\nkey = "c"\n'


def read(directory: Path, text: str) -> Config:
    path = directory / "boundary.toml"
    path.write_text(text)
    return read_config(path)


def test_every_key_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, WHOLE)
    assert (config.zone, config.listen) == ("plant-a", "0.0.0.0:7700")
    assert config.store == "postgresql://boundary@db/boundary"
    assert config.settings() == BoundarySettings(
        strict_consumers=True,
        require_artifacts=True,
        retention={"operational": 12 * 3600.0, "audit": 3650 * 86400.0, "documents": 5400.0},
        capacity_bytes=10**10,
        backpressure_at=0.9,
        drop_oldest=True,
        max_consumers=20,
        max_labels=10,
        max_objects=500,
        max_object_bytes=2 * 2**30,
    )
    assert config.peers == (
        Peer(
            identity="hq-bsfg",
            zone="hq",
            from_zones=("hq", "plant-b"),
            to_zones=("plant-a",),
            consumers=("hq-receiver",),
        ),
        Peer(identity="reader", zone="lab"),
    )
    [link] = config.links
    assert (link.name, link.url, link.consumer) == (
        "from-hq",
        "https://hq.example:7700",
        "plant-a-receiver",
    )
    assert (link.from_zones, link.to_zones) == (("hq",), ("plant-a",))


def test_relative_paths_of_tls_begin_beside_the_configuration(tmp_path: Path) -> None:
    assert read(tmp_path, WHOLE).files(tmp_path) == Tls(
        ca=tmp_path / "certs/ca.pem",
        cert=tmp_path / "certs/plant-a.pem",
        key=Path("/etc/boundary/plant-a.key"),
    )


def test_an_empty_file_is_a_server_with_the_usual_settings(tmp_path: Path) -> None:
    config = read(tmp_path, "")
    assert config.settings() == BoundarySettings()
    assert config.files(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [("1B", 1), ("500MB", 5 * 10**8), ("2GiB", 2**31), ("1.5 TB", 15 * 10**11), ("64KiB", 65536)],
)
def test_sizes_have_units(tmp_path: Path, text: str, number: int) -> None:
    assert read(tmp_path, f'[buffer]\ncapacity = "{text}"').settings().capacity_bytes == number


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zone =", "is not TOML: Invalid value"),
        ('zon = "a"', ": the file has no key 'zon'; check the spelling"),
        ("zone = 1", ": zone: must be a string, not an integer"),
        ('zone = ""', ": zone: must be a nonempty string"),
        ('strict_consumers = "yes"', ": strict_consumers: must be true or false, not a string"),
        ('listen = "7700"', ": listen must be HOST:PORT, such as 127.0.0.1:7700, not '7700'"),
        ("tls = 1", ": tls: must be a table, not an integer"),
        ('[tls]\nca = "a"', ": [tls] must have the key 'cert'"),
        (TLS + 'ciphers = "x"', ": [tls] has no key 'ciphers'"),
        (TLS.replace('"b"', "2"), ": [tls] cert: must be a string, not an integer"),
        ("peers = 1", ": peers: must be a list, not an integer"),
        ("peers = [1]", ": [[peers]] number 1: must be a table, not an integer"),
        (TLS + '[[peers]]\nidentity = "x"', ": [[peers]] number 1 ('x') must have the key 'zone'"),
        (TLS + '[[peers]]\nzone = "x"', ": [[peers]] number 1 must have the key 'identity'"),
        (
            TLS + '[[peers]]\nidentity = "a"\nzone = "a"\n[[peers]]\nidentity = "b"\nzone = "b"\nzones = []',
            ": [[peers]] number 2 ('b') has no key 'zones'",
        ),
        (
            TLS + '[[peers]]\nidentity = "a"\nzone = "a"\nfrom_zones = "a"',
            ": [[peers]] number 1 ('a') from_zones: must be a list, not a string",
        ),
        (
            TLS + '[[peers]]\nidentity = "a"\nzone = "a"\nto_zones = [1]',
            ": [[peers]] number 1 ('a') to_zones[0]: must be a string, not an integer",
        ),
        (
            TLS + '[[peers]]\nidentity = "a"\nzone = "a"\n' * 2,
            "boundary.toml: two peers have the identity 'a'",
        ),
        (
            '[[peers]]\nidentity = "a"\nzone = "a"',
            ": [[peers]] are identified by their certificates: add [tls]",
        ),
        ('[[links]]\nname = "a"\nurl = "u"', ": zone is missing: a server with [[links]] must know"),
        ('zone = "z"\n' + '[[links]]\nname = "a"\nurl = "u"\n' * 2, ": two [[links]] have the name 'a'"),
        ('[[links]]\nname = "a"', ": [[links]] number 1 ('a') must have the key 'url'"),
        ('[retention]\nyears = "7d"', ": [retention] has no key 'years'"),
        ("[retention]\naudit = 7", ": [retention] audit: must be a string, not an integer"),
        ('[retention]\naudit = "7"', ": [retention] audit: must be a number with a unit, such as 7d"),
        ('[retention]\naudit = "7y"', "not '7y'"),
        ('[retention]\naudit = "0d"', "not '0d'"),
        ('[retention]\naudit = "-7d"', "not '-7d'"),
        ('[buffer]\ncapacity = "10"', ": [buffer] capacity: must be a number with a unit, such as 10GB"),
        ('[buffer]\ncapacity = "10gb"', "not '10gb'"),
        ("[quotas]\nconsumers = -1", ": [quotas] consumers: must be an integer of 0 or more"),
        ('[quotas]\nlabels = "many"', ": [quotas] labels: must be an integer, not a string"),
        ("[quotas]\nnames = 5", ": [quotas] has no key 'names'"),
        (
            '[quotas]\nobject_bytes = "5"',
            ": [quotas] object_bytes: must be a number with a unit, such as 10GB",
        ),
        ("[buffer]\nthreshold = 1.5", ": [buffer] threshold: must be a number of at most 1"),
        ("[buffer]\nthreshold = 0", ": [buffer] threshold: must be a number above 0"),
        ('[buffer]\nthreshold = "80%"', ": [buffer] threshold: must be a number, not a string"),
        (
            '[buffer]\nwhen_full = "wait"',
            ": [buffer] when_full: must be refuse or drop_oldest, not 'wait'",
        ),
        (
            '[buffer]\nwhen_full = "drop_oldest"\nsafety = true',
            ": [buffer] when_full: drop_oldest loses facts, which safety = true forbids",
        ),
    ],
)
def test_a_mistake_is_said_with_file_table_and_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read(tmp_path, text)
    assert str(refused.value).startswith(str(tmp_path / "boundary.toml"))
    assert words in str(refused.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_config(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        read_config(tmp_path / "binary.toml")

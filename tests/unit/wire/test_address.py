import pytest

from maitred.core.errors import ConfigInvalid
from maitred.wire.address import MAX_UNIX_PATH_BYTES, TcpAddress, UnixAddress, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/engine.sock", UnixAddress("/run/engine.sock")),
        ("unix:/run/odd:name", UnixAddress("/run/odd:name")),
        ("tcp:127.0.0.1:9000", TcpAddress("127.0.0.1", 9000)),
        ("tcp:engine-0.pool:0", TcpAddress("engine-0.pool", 0)),
        ("tcp:[::1]:9000", TcpAddress("::1", 9000)),
    ],
)
def test_reads_and_prints_the_same_text(text, address):
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("unix:///run/engine.sock", "unix:/run/engine.sock"),
        ("tcp://127.0.0.1:9000", "tcp:127.0.0.1:9000"),
        ("tcp://[::1]:9000", "tcp:[::1]:9000"),
    ],
)
def test_a_url_is_the_same_address(url, text):
    assert parse_address(url) == parse_address(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not an engine address"),
        ("/run/engine.sock", "not an engine address"),
        ("http://127.0.0.1:9000", "not an engine address"),
        ("unix:engine.sock", "absolute path"),
        ("unix:", "absolute path"),
        ("unix:/a\0b", "absolute path"),
        ("tcp:9000", "needs a host"),
        ("tcp::9000", "needs a host"),
        ("tcp:[]:9000", "needs a host"),
        ("tcp:::1:9000", "brackets"),
        ("tcp:host:", "port"),
        ("tcp:host:65536", "port"),
        ("tcp:host:-1", "port"),
        ("tcp:host:٣", "port"),
        ("tcp:gateways..internal:9300", "name of a host"),
        (f"tcp:{'x' * 64}:9300", "name of a host"),
        ("unix:/" + "x" * MAX_UNIX_PATH_BYTES, "shorter folder"),
    ],
)
def test_a_bad_address_says_what_to_write(text, says):
    with pytest.raises(ConfigInvalid, match=says):
        parse_address(text)


def test_the_longest_path_is_taken():
    path = "/" + "x" * (MAX_UNIX_PATH_BYTES - 1)
    assert parse_address(f"unix:{path}") == UnixAddress(path)

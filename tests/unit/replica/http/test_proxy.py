"""Which proxy of the environment leads to a server."""

import pytest

from maitred.core.errors import ConfigInvalid
from maitred.replica.http.proxy import HttpProxy, proxy_for

PROXY = "http://proxy.example:8080"


def found(host, *, uses_tls=True, port=443, **env):
    return proxy_for(host, port, env, uses_tls=uses_tls)


@pytest.mark.parametrize(
    ("env", "uses_tls", "host"),
    [
        ({"HTTPS_PROXY": PROXY}, True, "proxy.example"),
        ({"HTTPS_PROXY": PROXY}, False, None),
        ({"HTTP_PROXY": PROXY}, False, "proxy.example"),
        ({"ALL_PROXY": PROXY}, True, "proxy.example"),
        ({"https_proxy": "http://small:1", "HTTPS_PROXY": PROXY}, True, "small"),
        ({"HTTPS_PROXY": ""}, True, None),
        ({}, True, None),
    ],
)
def test_the_variable_is_that_of_the_scheme(env, uses_tls, host):
    proxy = found("api.example", uses_tls=uses_tls, **env)
    assert (None if proxy is None else proxy.host) == host


@pytest.mark.parametrize(
    ("no_proxy", "host", "excluded"),
    [
        ("api.example", "api.example", True),
        ("example", "api.example", True),
        (".example", "api.example", True),
        ("*.example", "api.example", True),
        ("pi.example", "api.example", False),
        ("other, api.example", "API.example.", True),
        ("*", "api.example", True),
        ("api.example:443", "api.example", True),
        ("api.example:8443", "api.example", False),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("fd00::/8", "fd00::1", True),
        ("10.0.0.0/8", "api.example", False),
        ("", "127.0.0.1", True),
        ("", "localhost", True),
        ("", "api.example", False),
    ],
)
def test_no_proxy_has_names_domains_addresses_and_networks(no_proxy, host, excluded):
    assert (found(host, HTTPS_PROXY=PROXY, NO_PROXY=no_proxy) is None) == excluded


def test_credentials_and_ports_are_read_from_the_url():
    proxy = found("api.example", HTTPS_PROXY="http://us%40er:pa%3Ass@[fd00::1]:99")
    assert proxy == HttpProxy("fd00::1", 99, "Basic dXNAZXI6cGE6c3M=")
    assert proxy.name == "[fd00::1]:99"
    assert found("api.example", HTTPS_PROXY="proxy.example").port == 3128


@pytest.mark.parametrize(
    "url", ["https://user:secret@proxy.example", "socks5://secret.example", "http://", "http://h:secret"]
)
def test_what_is_no_http_proxy_is_said_without_its_password(url):
    with pytest.raises(ConfigInvalid, match="HTTPS_PROXY must be the URL of an HTTP proxy") as refused:
        found("api.example", HTTPS_PROXY=url)
    assert "secret" not in refused.value.message

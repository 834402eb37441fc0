"""Which hosts and origins are accepted without a key."""

import pytest

from maitred.api.headers import HostPolicy
from maitred.core.errors import Forbidden

POLICY = HostPolicy(["gateway.example", "Upper.Example."])
LOCAL = "127.0.0.1:8000"


def is_accepted(method="POST", host=LOCAL, **headers):
    values = {name.replace("_", "-"): value for name, value in {"host": host, **headers}.items()}
    try:
        POLICY.check(method, lambda name: values.get(name.decode()))
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        None,
        LOCAL,
        "127.0.0.1",
        "127.9.9.9:1",
        "localhost:8000",
        "LocalHost",
        "localhost.",
        "app.localhost:80",
        "[::1]:8000",
        "gateway.example",
        "GATEWAY.example:443",
        "upper.example",
    ],
)
def test_hosts_of_this_machine_and_named_ones_are_accepted(host):
    assert is_accepted(host=host)
    if host is not None:
        assert is_accepted(origin=f"http://{host}", sec_fetch_site="cross-site")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "xlocalhost",
        "10.0.0.1",
        "0.0.0.0",
        "[::2]",
        "[",
        "",
        "sub.gateway.example",
    ],
)
def test_other_hosts_and_pages_of_other_hosts_are_not(host):
    assert not is_accepted(host=host)
    assert not is_accepted(origin=f"https://{host}")


@pytest.mark.parametrize("origin", ["null", "", "file://", "data:text/html,x"])
def test_a_page_without_an_origin_of_its_own_is_not(origin):
    assert not is_accepted(origin=origin)


def test_what_another_site_fetches_is_refused_and_what_it_links_to_is_not():
    assert not is_accepted("GET", sec_fetch_site="cross-site", sec_fetch_mode="no-cors", sec_fetch_dest="image")
    assert not is_accepted("GET", sec_fetch_site="cross-site", sec_fetch_mode="navigate", sec_fetch_dest="iframe")
    assert not is_accepted("POST", sec_fetch_site="cross-site", sec_fetch_mode="navigate", sec_fetch_dest="document")
    assert is_accepted("GET", sec_fetch_site="cross-site", sec_fetch_mode="navigate", sec_fetch_dest="document")
    assert is_accepted("GET", sec_fetch_site="same-origin")
    assert is_accepted("GET", sec_fetch_site="none")

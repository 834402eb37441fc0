"""Which hosts and origins are accepted without a key, and which pages may read responses."""

import msgspec
import pytest

from maitred.api.config import ServerConfig
from maitred.api.origin_policy import OriginPolicy, is_preflight
from maitred.core.errors import Forbidden

PAGE = "https://app.example"
POLICY = OriginPolicy(ServerConfig(allowed_hosts=("gateway.example", "Upper.Example."), cors_origins=(PAGE, "*")))
LOCAL = "127.0.0.1:8000"


def asking(**headers):
    values = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    return values.get


def is_accepted(method="POST", host=LOCAL, policy=POLICY, **headers):
    try:
        policy.check_without_key(method, asking(host=host, **headers))
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


def test_a_page_whose_origin_is_named_is_accepted_and_a_star_names_none():
    assert is_accepted(origin=PAGE, sec_fetch_site="cross-site")
    assert not is_accepted(origin=f"{PAGE}:8443")
    assert not is_accepted(host="app.example")


@pytest.mark.parametrize("settings", [{"allow_unauthenticated": False}, {"host": "0.0.0.0"}])
def test_where_keys_are_needed_or_others_reach_the_server_hosts_are_not_checked(settings):
    assert is_accepted(host="evil.example", origin="null", policy=OriginPolicy(ServerConfig(**settings)))


def cors(*origins):
    return OriginPolicy(ServerConfig(cors_origins=origins))


@pytest.mark.parametrize("origin", [PAGE, "HTTPS://App.Example", "http://localhost:3000", "app://obsidian.md"])
def test_a_named_origin_reads_responses(origin):
    policy = cors("https://APP.example", "http://localhost:3000", "app://obsidian.md")
    assert dict(policy.response_headers(origin)) == {
        b"access-control-allow-origin": origin.encode(),
        b"access-control-expose-headers": b"*",
        b"vary": b"origin",
    }


@pytest.mark.parametrize(
    "origin", ["http://app.example", f"{PAGE}:8443", f"{PAGE}.evil.example", "https://sub.app.example", "null", ""]
)
def test_no_other_origin_does(origin):
    policy = cors(PAGE)
    assert list(policy.response_headers(origin)) == []
    with pytest.raises(Forbidden, match=r"server\.cors_origins"):
        policy.preflight_headers(origin, asking(access_control_request_method="POST"))


@pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost"])
def test_a_star_lets_every_page_read_responses(origin):
    assert dict(cors("*").response_headers(origin))[b"access-control-allow-origin"] == b"*"
    assert list(cors().response_headers(origin)) == []


def test_a_preflight_is_allowed_what_it_asks_for():
    headers = "authorization,x-stainless-os"
    asked = asking(access_control_request_method="DELETE", access_control_request_headers=headers)
    assert dict(cors(PAGE).preflight_headers(PAGE, asked)) == {
        b"access-control-allow-methods": b"DELETE",
        b"access-control-allow-headers": b"authorization,x-stainless-os",
        b"access-control-max-age": b"600",
    }
    bare = dict(cors(PAGE).preflight_headers(PAGE, asking(access_control_request_method="POST")))
    assert b"access-control-allow-headers" not in bare


def test_only_options_that_name_a_method_are_preflights():
    assert is_preflight("OPTIONS", asking(access_control_request_method="POST"))
    assert not is_preflight("OPTIONS", asking())
    assert not is_preflight("POST", asking(access_control_request_method="POST"))


@pytest.mark.parametrize("origin", ["*", PAGE, "http://127.0.0.1:3000", "http://[::1]:80", "tauri://localhost"])
def test_a_setting_is_an_origin(origin):
    assert msgspec.convert({"cors_origins": [origin]}, ServerConfig).cors_origins == (origin,)


@pytest.mark.parametrize(
    "origin", ["", "app.example", f"{PAGE}/", f"{PAGE}/page", "null", "https://*.example", "a b://c"]
)
def test_what_no_browser_sends_as_an_origin_is_refused(origin):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"cors_origins": [origin]}, ServerConfig)

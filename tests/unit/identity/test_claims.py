import pytest

from maitred.core.tenancy import Scope
from maitred.identity.claims import live, read_key, read_scopes, read_tenants
from maitred.identity.config import OidcConfig


def config(**settings):
    return OidcConfig(issuer="https://idp.example", audience="maitred", **settings)


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({"exp": 1001}, True),
        ({"exp": 1000.5}, True),
        ({"exp": 991}, True),
        ({"exp": 990}, False),
        ({"exp": 2000, "nbf": 1010}, True),
        ({"exp": 2000, "nbf": 1011}, False),
        ({}, False),
        ({"exp": None}, False),
        ({"exp": True}, False),
        ({"exp": "2000"}, False),
        ({"exp": float("nan")}, False),
        ({"exp": float("inf")}, False),
        ({"exp": 10**400}, False),
        ({"exp": 2000, "nbf": "soon"}, False),
        ({"exp": 2000, "nbf": None}, False),
        ({"exp": 2000, "nbf": float("nan")}, False),
        ({"exp": 2000, "nbf": -float("inf")}, False),
    ],
)
def test_a_token_holds_from_its_beginning_to_its_end_give_or_take_the_leeway(claims, expected):
    assert live(claims, now_s=1000.0, leeway_s=10.0) is expected


@pytest.mark.parametrize(
    ("claims", "settings", "expected"),
    [
        ({"tenant": "acme"}, {}, ["acme"]),
        ({"tenant": ["acme", 7, "lab"]}, {}, ["acme", "lab"]),
        ({"tenant": 7}, {}, []),
        ({"tenant": {"acme": 1}}, {}, []),
        ({}, {}, []),
        ({}, {"default_tenant": "guests"}, ["guests"]),
        ({"tenant": "odd"}, {"default_tenant": "guests", "tenants": {"a": "acme"}}, []),
        ({"tenant": "a"}, {"tenants": {"a": "acme"}}, ["acme"]),
        ({"tenant": "acme"}, {"tenants": {"a": "acme"}}, []),
        (
            {"groups": ["x", "b", "a"]},
            {"tenant_claim": "groups", "tenants": {"a": "acme", "b": "lab"}},
            ["lab", "acme"],
        ),
        ({"org": {"id": "acme"}}, {"tenant_claim": "org.id"}, ["acme"]),
        ({"org": "acme"}, {"tenant_claim": "org.id"}, []),
        ({"https://x.example/org": "acme"}, {"tenant_claim": "https://x.example/org"}, ["acme"]),
    ],
)
def test_the_tenant_is_what_the_configuration_says_of_the_claim(claims, settings, expected):
    assert read_tenants(claims, config(**settings)) == expected


@pytest.mark.parametrize(
    ("claims", "settings", "expected"),
    [
        ({}, {}, {Scope.INFERENCE}),
        ({}, {"default_scopes": ()}, set()),
        ({"scope": "openid maitred:metrics"}, {}, {Scope.METRICS}),
        ({"scope": ["maitred:admin", 3, "maitred:inference"]}, {}, {Scope.ADMIN, Scope.INFERENCE}),
        ({"scope": "admin"}, {}, {Scope.INFERENCE}),
        ({"scope": {"maitred:admin": True}}, {}, {Scope.INFERENCE}),
        ({"roles": ["ops"]}, {"scope_claim": "roles", "scopes": {"ops": "admin"}}, {Scope.ADMIN}),
        ({"scope": [["maitred:admin"]]}, {}, {Scope.INFERENCE}),
    ],
)
def test_scopes_are_what_the_configuration_says_of_the_claim(claims, settings, expected):
    assert read_scopes(claims, config(**settings)) == expected


def test_subjects_are_short_printable_and_differ():
    assert read_key("idp", {"sub": "auth0|5f7c"}) == "idp:auth0|5f7c"
    odd = ["a b", "a\tb", "ä", "x" * 129, "x" * 130, "~" + "0" * 64, "\ud800", "a:b\n"]
    keys = [read_key("idp", {"sub": subject}) for subject in odd]
    assert len(set(keys)) == len(odd)
    for key in keys:
        assert key.isascii()
        assert key.isprintable()
        assert len(key) < 140
    for nobody in ({}, {"sub": ""}, {"sub": 7}, {"sub": None}):
        assert read_key("idp", nobody) is None

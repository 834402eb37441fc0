"""Tokens and the keys that they are checked with, without a network."""

import asyncio
import builtins
import json

import pytest

from maitred.core.errors import ConfigInvalid, Unavailable
from maitred.core.tenancy import DirectoryChanges, Scope, Tenant
from maitred.identity.config import OidcConfig
from maitred.identity.directory import Directory
from maitred.identity.oidc import OidcIssuers
from maitred.identity.providers import provider_faults, token_issuers
from maitred.wire.loopback import is_trustworthy
from tests.support.clock import FakeClock
from tests.support.servers.identity_provider import KEYS, Provider, jwk


class Fixture:
    """One provider, and a gateway that trusts it."""

    def __init__(self, **settings):
        self.clock = FakeClock()
        self.provider = Provider()
        self.directory = Directory()
        self.directory.apply(DirectoryChanges(1, [Tenant(id="acme", models=("small",)), Tenant(id="lab")]))
        self.fetched = []
        self.fault = None
        settings = {"issuer": self.provider.issuer, "audience": "maitred", **settings}
        self.issuers = OidcIssuers({"idp": OidcConfig(**settings)}, self.directory, self.clock, self.fetch)

    async def fetch(self, url):
        self.fetched.append(url)
        if self.fault is not None:
            raise self.fault
        return self.provider.discovery if url.endswith("openid-configuration") else self.provider.key_set

    async def who(self, token):
        assert self.issuers.is_issued(token)
        return await self.issuers.principal_for(token)

    @property
    def keys(self):
        return self.issuers._keys[self.provider.issuer]

    @property
    def fetches(self):
        return sum(url.endswith("/keys") for url in self.fetched)


@pytest.mark.parametrize(
    ("signer", "algorithm"),
    [("r1", "RS256"), ("r1", "RS512"), ("r1", "PS256"), ("e1", "ES256"), ("e2", "ES384"), ("d1", "EdDSA")],
)
async def test_a_token_with_a_good_signature_is_its_subject(signer, algorithm):
    fixture = Fixture(algorithms=(algorithm,))
    fixture.provider.published = [jwk(kid) for kid in ("r1", "e1", "e2", "d1")]
    found = await fixture.who(fixture.provider.token(signer, algorithm=algorithm))
    assert found.key == "idp:ann"
    assert found.tenants == ("acme",)
    assert found.scopes == {Scope.INFERENCE}
    assert found.models == {"small"}
    assert found.subjects == ("key:idp:ann", "tenant:acme", "*")


REFUSED = {
    "alg none": lambda p: p.unsigned(),
    "public key as secret": lambda p: p.signed_with_the_public_key(),
    "algorithm not allowed": lambda p: p.token(algorithm="RS512"),
    "signed by another key": lambda p: p.token("r2", kid="r1"),
    "other family's key": lambda p: p.token("e1", kid="r1"),
    "unknown kid": lambda p: p.token("r2"),
    "no kid among several": lambda p: p.token("r1", kid=None),
    "wrong audience": lambda p: p.token(aud="other"),
    "audience missing": lambda p: p.token(aud=None),
    "expired": lambda p: p.token(exp=p.now_s - 31),
    "no expiry": lambda p: p.token(exp=None),
    "expiry is text": lambda p: p.token(exp="never"),
    "expiry is far too large": lambda p: p.token(exp=10**400),
    "not begun": lambda p: p.token(nbf=p.now_s + 31),
    "no subject": lambda p: p.token(sub=None),
    "empty subject": lambda p: p.token(sub=""),
    "subject is a number": lambda p: p.token(sub=7),
    "unknown tenant": lambda p: p.token(tenant="elsewhere"),
    "no tenant": lambda p: p.token(tenant=None),
    "critical extension": lambda p: p.token(headers={"crit": ["x"], "x": 1}),
    "cut signature": lambda p: p.token()[:-4],
    "no signature": lambda p: p.token().rpartition(".")[0] + ".",
    "swapped claims": lambda p: ".".join(
        [p.token().split(".")[0], p.token(sub="eve").split(".")[1], p.token().split(".")[2]]
    ),
    "odd header": lambda p: "." + p.token().partition(".")[2],
    "header is a list": lambda p: "W10." + p.token().partition(".")[2],
}


@pytest.mark.parametrize("forge", REFUSED.values(), ids=REFUSED)
async def test_a_token_with_any_fault_is_refused(forge):
    fixture = Fixture()
    fixture.provider.published.append(jwk("r2", kid="r3"))
    assert await fixture.who(forge(fixture.provider)) is None


async def test_an_algorithm_that_is_not_allowed_makes_nobody_look_for_keys():
    fixture = Fixture()
    for forged in (fixture.provider.unsigned(), fixture.provider.signed_with_the_public_key()):
        assert await fixture.who(forged) is None
    assert fixture.fetched == []


async def test_tokens_of_others_are_not_of_this_issuer():
    fixture = Fixture()
    good = fixture.provider.token()
    foreign = [
        Provider("https://other.example").token(),
        fixture.provider.token(iss=fixture.provider.issuer + "/"),
        fixture.provider.token(iss=None),
        good + ".x",
        good.partition(".")[2],
        "é" + good,
        "..",
        "a.b.c",
        good.replace(".", ". ", 1) + "x" * 20_000,
    ]
    for token in foreign:
        assert not fixture.issuers.is_issued(token)
        assert await fixture.issuers.principal_for(token) is None
    assert fixture.fetched == []


async def test_the_leeway_is_for_clocks_that_differ():
    fixture = Fixture(leeway_s=5.0)
    provider = fixture.provider
    assert await fixture.who(provider.token(exp=provider.now_s - 4)) is not None
    assert await fixture.who(provider.token(exp=provider.now_s - 5)) is None
    assert await fixture.who(provider.token(nbf=provider.now_s + 5)) is not None
    assert await fixture.who(provider.token(nbf=provider.now_s + 6)) is None


async def test_a_token_that_was_good_ends_and_loses_its_tenant():
    fixture = Fixture(leeway_s=0.0)
    token = fixture.provider.token()
    assert await fixture.who(token) is not None
    fixture.directory.apply(DirectoryChanges(2, [Tenant(id="acme", disabled=True)]))
    assert await fixture.who(token) is None
    fixture.directory.apply(DirectoryChanges(3, [Tenant(id="acme")]))
    assert await fixture.who(token) is not None
    fixture.clock.now_s += 60
    assert await fixture.who(token) is None


async def test_a_signature_is_checked_once_per_key(monkeypatch):
    fixture = Fixture(keys_ttl_s=100.0, leeway_s=600.0)
    checked = []
    decode = __import__("jwt").decode
    monkeypatch.setattr("jwt.decode", lambda token, *a, **k: checked.append(token) or decode(token, *a, **k))
    token, other = fixture.provider.token(), fixture.provider.token("e1")
    for presented in (token, token, other, token, other):
        assert (await fixture.who(presented)).key == "idp:ann"
    assert checked == [token, other]
    # The keys are fetched anew, and one of them is another now: what it signed before counts no longer.
    fixture.provider.published[0] = jwk("r2", kid="r1")
    fixture.clock.now_s += 101
    await fixture.who(other)
    await asyncio.wait([fixture.keys._asking])
    assert fixture.fetches == 2
    assert await fixture.who(token) is None


async def test_the_signatures_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr("maitred.identity.oidc._MOST_VERIFIED", 2)
    fixture = Fixture()
    for number in range(5):
        assert await fixture.who(fixture.provider.token(sub=f"s{number}")) is not None
    assert len(fixture.issuers._verified) == 2


async def test_a_group_that_is_a_tenant_counts():
    fixture = Fixture(tenant_claim="groups")
    token = fixture.provider.token(groups=["everybody", "lab", "acme"])
    assert (await fixture.who(token)).tenants == ("lab",)


async def test_keys_are_found_by_discovery_or_at_the_configured_address():
    fixture = Fixture()
    assert await fixture.who(fixture.provider.token()) is not None
    assert fixture.fetched == [
        "https://idp.example/.well-known/openid-configuration",
        "https://idp.example/keys",
    ]
    fixture = Fixture(jwks_url="https://elsewhere.example/keys")
    assert await fixture.who(fixture.provider.token()) is not None
    assert fixture.fetched == ["https://elsewhere.example/keys"]


async def test_a_new_key_is_fetched_when_a_token_needs_it():
    fixture = Fixture(keys_refetch_s=10.0)
    assert await fixture.who(fixture.provider.token()) is not None
    fixture.provider.published = [jwk("r2")]
    fixture.clock.now_s += 10
    assert await fixture.who(fixture.provider.token("r2")) is not None
    assert fixture.fetches == 2
    # The one that is no longer published is no longer good.
    assert await fixture.who(fixture.provider.token()) is None


async def test_a_flood_of_unknown_keys_fetches_nothing_more():
    fixture = Fixture(keys_refetch_s=10.0)
    tokens = [fixture.provider.token("r2", kid=f"made-up-{number}") for number in range(50)]
    assert set(await asyncio.gather(*map(fixture.who, tokens))) == {None}
    for token in tokens:
        assert await fixture.who(token) is None
    assert fixture.fetches == 1
    fixture.clock.now_s += 10
    assert set(await asyncio.gather(*map(fixture.who, tokens))) == {None}
    assert fixture.fetches == 2


async def test_a_request_that_leaves_does_not_take_the_fetch_with_it():
    fixture = Fixture()
    gate = asyncio.Event()
    fetch = fixture.fetch

    async def slow(url):
        await gate.wait()
        return await fetch(url)

    fixture.keys._fetch = slow
    token = fixture.provider.token()
    first, second = (asyncio.create_task(fixture.who(token)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    gate.set()
    assert await second is not None


async def test_keys_are_used_while_the_provider_is_away_and_no_longer_than_stated():
    fixture = Fixture(keys_ttl_s=60.0, keys_max_stale_s=300.0, keys_refetch_s=10.0, leeway_s=600.0)
    token = fixture.provider.token()
    assert await fixture.who(token) is not None
    fixture.fault = OSError("unreachable")
    for _ in range(5):
        fixture.clock.now_s += 60
        assert await fixture.who(token) is not None
    fixture.clock.now_s += 1
    with pytest.raises(Unavailable, match="'idp'") as caught:
        await fixture.who(token)
    assert caught.value.retry_after_s >= 1
    fixture.fault = None
    fixture.clock.now_s += 10
    assert await fixture.who(token) is not None


@pytest.mark.parametrize(
    "fault",
    [
        OSError("unreachable"),
        TimeoutError(),
        b"",
        b"[]",
        b'{"keys": 1}',
        b"<html>",
        b"[" * 100_000,
        b"\xff",
    ],
    ids=repr,
)
async def test_a_provider_that_says_nothing_sensible_is_away(fault):
    fixture = Fixture(jwks_url="https://idp.example/keys", keys_refetch_s=10.0)

    async def fetch(url):
        fixture.fetched.append(url)
        if isinstance(fault, Exception):
            raise fault
        return fault

    fixture.keys._fetch = fetch
    for _ in range(3):
        with pytest.raises(Unavailable):
            await fixture.who(fixture.provider.token())
    assert fixture.fetches == 1


@pytest.mark.parametrize(
    "document",
    [
        {"issuer": "https://idp.example/", "jwks_uri": "https://idp.example/keys"},
        {"issuer": "https://idp.example", "jwks_uri": "http://idp.example/keys"},
        {"issuer": "https://idp.example", "jwks_uri": "file:///etc/keys"},
        {"issuer": "https://idp.example"},
    ],
)
async def test_a_discovery_that_leads_astray_is_not_followed(document):
    fixture = Fixture()

    async def fetch(url):
        fixture.fetched.append(url)
        return json.dumps(document).encode()

    fixture.keys._fetch = fetch
    with pytest.raises(Unavailable):
        await fixture.who(fixture.provider.token())
    assert fixture.fetches == 0


@pytest.mark.filterwarnings("ignore::jwt.InsecureKeyLengthWarning")  # of the signer
async def test_keys_that_prove_nothing_are_left_out():
    fixture = Fixture()
    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "r1"}
    fixture.provider.published = [
        secret,
        jwk("weak"),
        {**jwk("r1"), "n": 7},
        {"kty": ["RSA"], "kid": "r1"},
        {},
        jwk("e1", use="enc"),
        jwk("r2", alg="RS512"),
    ]
    assert await fixture.who(fixture.provider.token()) is None
    assert await fixture.who(fixture.provider.token("weak", algorithm="RS256")) is None
    assert await fixture.who(fixture.provider.token("e1")) is None
    assert await fixture.who(fixture.provider.token("r2")) is None


async def test_a_token_may_leave_out_which_key_if_there_is_one():
    fixture = Fixture()
    assert await fixture.who(fixture.provider.token(kid=None)) is not None
    assert await fixture.who(fixture.provider.token("e1", kid=None)) is not None


async def test_an_empty_key_set_takes_all_keys_back():
    fixture = Fixture(keys_ttl_s=60.0)
    fixture.provider.published = []
    assert await fixture.who(fixture.provider.token()) is None


async def test_closing_ends_a_fetch():
    fixture = Fixture()

    async def never(url):
        await asyncio.Event().wait()

    fixture.keys._fetch = never
    async with fixture.issuers:
        waiting = asyncio.create_task(fixture.who(fixture.provider.token()))
        await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await waiting


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://idp.example", True),
        ("http://127.0.0.1:8080/x", True),
        ("http://[::1]/x", True),
        ("http://localhost/x", True),
        ("http://idp.example", False),
        ("http://localhost.example", False),
        ("http://127.0.0.1@idp.example", False),
        ("http://10.0.0.1", False),
        ("ftp://localhost", False),
        ("https://", False),
        ("http://[::1", False),
        ("idp.example", False),
        ("", False),
    ],
)
def test_keys_come_from_where_nobody_can_replace_them(url, expected):
    assert is_trustworthy(url) is expected


async def test_providers_that_prove_nothing_are_faults_of_the_configuration():
    configs = {
        "plain": OidcConfig(issuer="http://idp.example", audience="a"),
        "keys": OidcConfig(issuer="https://b.example", audience="a", jwks_url="http://b.example/keys"),
        "first": OidcConfig(issuer="https://idp.example", audience="a"),
        "second": OidcConfig(issuer="https://idp.example", audience="b"),
        "none": OidcConfig(issuer="https://c.example", audience="a", algorithms=()),
        "local": OidcConfig(issuer="http://127.0.0.1:8080", audience="a"),
    }
    assert [key for key, _ in provider_faults(configs)] == [
        "identity.oidc.plain.issuer",
        "identity.oidc.keys.jwks_url",
        "identity.oidc.second.issuer",
        "identity.oidc.none.algorithms",
    ]
    with pytest.raises(ConfigInvalid, match="is the issuer of 'first' too"):
        async with token_issuers(configs, Directory(), FakeClock()):
            pass


async def test_without_providers_nothing_is_needed(monkeypatch):
    real = builtins.__import__

    def without_jwt(name, *rest):
        if name == "maitred.identity.oidc":
            raise ModuleNotFoundError("No module named 'jwt'", name="jwt")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_jwt)
    async with token_issuers({}, Directory(), FakeClock()) as issuers:
        assert issuers is None
    configs = {"idp": OidcConfig(issuer="https://idp.example", audience="a")}
    with pytest.raises(ConfigInvalid, match=r"pip install 'maitred\[oidc\]'"):
        async with token_issuers(configs, Directory(), FakeClock()):
            pass


def test_the_weak_key_is_weak():
    assert KEYS["weak"].key_size == 1024

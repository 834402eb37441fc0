"""Whatever stands in the headers, it is refused in one way, unless it is a key that is known."""

import base64
import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.errors import Unauthenticated
from maitred.core.tenancy import ApiKey, DirectoryChanges, Tenant
from maitred.identity.config import OidcConfig
from maitred.identity.directory import Directory
from maitred.identity.identity import Identity
from maitred.identity.keys import make_key, matches, parse
from maitred.identity.oidc import OidcIssuers
from tests.support.clock import FakeClock
from tests.support.servers.identity_provider import Provider

MADE = make_key()
CLOCK = FakeClock()
DIRECTORY = Directory()
DIRECTORY.apply(
    DirectoryChanges(1, [Tenant(id="acme")], [ApiKey(id=MADE.public_id, tenant="acme", secrets=(MADE.secret,))])
)
ISSUER = "https://idp.example"
PROVIDER_CONFIG = OidcConfig(issuer=ISSUER, audience="maitred", jwks_url=f"{ISSUER}/keys")


PROVIDER = Provider(ISSUER, CLOCK.now_s)
GOOD = PROVIDER.token()


async def fetch(url: str) -> bytes:
    return PROVIDER.key_set


def mangled(text: str) -> st.SearchStrategy[str]:
    """The text with a piece of it replaced."""
    return st.tuples(st.integers(0, len(text)), st.integers(0, 5), st.text(max_size=5)).map(
        lambda cut: text[: cut[0]] + cut[2] + text[cut[0] + cut[1] :]
    )


RAW = st.binary(max_size=200).map(lambda raw: raw.decode("latin-1"))
SHAPED = st.from_regex(r"sk-mtd-[a-z0-9]{16}-[A-Za-z0-9_-]{43}", fullmatch=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def segment(known: dict[str, object]) -> st.SearchStrategy[str]:
    """A segment of a token that says what is known, with some of it replaced by anything."""
    odd = st.dictionaries(st.sampled_from([*known, "crit", "b64", "nbf", "iat", "jwk"]), JSON, max_size=3)
    return odd.map(
        lambda changes: base64.urlsafe_b64encode(json.dumps({**known, **changes}).encode()).rstrip(b"=").decode()
    )


TOKENS = st.tuples(
    st.sampled_from(["RS256", "ES256", "none", "HS256"]).flatmap(lambda alg: segment({"alg": alg, "kid": "r1"})),
    segment(PROVIDER.claims()),
    st.text(alphabet="AQgw-_", max_size=400) | st.just("A" * 342),
).map(".".join)
TEXTS = RAW | SHAPED | mangled(MADE.plaintext) | st.text(max_size=80) | TOKENS
HEADERS = st.dictionaries(
    st.sampled_from([b"authorization", b"x-api-key", b"api-key"]),
    TEXTS | TEXTS.map(lambda text: f"Bearer {text}"),
    max_size=3,
)


@settings(deadline=None, max_examples=200)
@given(HEADERS)
async def test_no_header_but_the_key_itself_gets_in(headers: dict[bytes, str]) -> None:
    if any(MADE.plaintext in value for value in headers.values()):
        return  # the key itself, mangled into itself
    issuers = OidcIssuers({"idp": PROVIDER_CONFIG}, DIRECTORY, CLOCK, fetch)
    with pytest.raises(Unauthenticated):
        await Identity(DIRECTORY, CLOCK, issuers=issuers).identify(headers.get)


@settings(deadline=None)
@given(TEXTS)
def test_what_parses_is_a_key_to_the_letter(text: str) -> None:
    parsed = parse(text)
    if parsed is not None:
        assert text == f"sk-mtd-{parsed[0]}-{parsed[1]}"
        assert text.isascii()


@settings(deadline=None)
@given(st.binary(min_size=32, max_size=32))
def test_a_hash_alone_opens_nothing(noise: bytes) -> None:
    parsed = parse(MADE.plaintext)
    assert parsed is not None
    assert matches(parsed[1], [MADE.secret], 0.0)
    assert not matches(hashlib.sha256(noise).hexdigest()[:43], [MADE.secret], 0.0)


@settings(deadline=None)
@given(st.integers(0, len(GOOD) - 2), st.sampled_from("AQgw-_.09"))
async def test_a_token_with_another_character_is_another_token(place: int, character: str) -> None:
    # The last character is left alone: some of its bits are of no byte.
    if GOOD[place] == character:
        return
    changed = GOOD[:place] + character + GOOD[place + 1 :]
    issuers = OidcIssuers({"idp": PROVIDER_CONFIG}, DIRECTORY, CLOCK, fetch)
    assert await issuers.principal_for(GOOD) is not None
    assert await issuers.principal_for(changed) is None

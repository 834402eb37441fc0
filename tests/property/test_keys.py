"""Whatever stands in the headers, it is refused in one way, unless it is a key that is known."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.directory import DirectoryChanges
from maitred.core.errors import Unauthenticated
from maitred.core.tenancy import ApiKey, Tenant
from maitred.identity.config import OidcConfig
from maitred.identity.directory import Directory
from maitred.identity.identity import Identity
from maitred.identity.keys import make_key, parse
from maitred.identity.oidc import OidcIssuers
from tests.clock import FakeClock

MADE = make_key()
CLOCK = FakeClock()
DIRECTORY = Directory()
DIRECTORY.apply(
    DirectoryChanges(1, [Tenant(id="acme")], [ApiKey(id=MADE.public_id, tenant="acme", secrets=(MADE.secret,))])
)
ISSUER = "https://idp.example"
CLAIMS = b'{"iss":"https://idp.example","sub":"a","aud":"x","exp":99999999999,"tenant":"acme"}'


async def away(url: str) -> bytes:
    raise OSError("away")


def mangled(text: str) -> st.SearchStrategy[str]:
    """The text with a piece of it replaced."""
    return st.tuples(st.integers(0, len(text)), st.integers(0, 5), st.text(max_size=5)).map(
        lambda cut: text[: cut[0]] + cut[2] + text[cut[0] + cut[1] :]
    )


RAW = st.binary(max_size=200).map(lambda raw: raw.decode("latin-1"))
SHAPED = st.from_regex(r"sk-mtd-[a-z0-9]{16}-[A-Za-z0-9_-]{43}", fullmatch=True)
TEXTS = RAW | SHAPED | mangled(MADE.plaintext) | st.text(max_size=80)
HEADERS = st.dictionaries(
    st.sampled_from([b"authorization", b"x-api-key", b"api-key"]),
    TEXTS | TEXTS.map(lambda text: f"Bearer {text}"),
    max_size=3,
)


@settings(deadline=None, max_examples=400)
@given(HEADERS)
async def test_no_header_but_the_key_itself_gets_in(headers: dict[bytes, str]) -> None:
    # Whole keys that are hidden in what was made up would be found rightly.
    if any(MADE.plaintext in value for value in headers.values()):
        return
    issuers = OidcIssuers({"idp": OidcConfig(issuer=ISSUER, audience="x")}, DIRECTORY, CLOCK, fetch=away)
    with pytest.raises(Unauthenticated):
        await Identity(DIRECTORY, CLOCK, issuers=issuers).identify(headers.get)


@given(TEXTS)
def test_what_parses_is_a_key_to_the_letter(text: str) -> None:
    parsed = parse(text)
    if parsed is not None:
        assert text == f"sk-mtd-{parsed[0]}-{parsed[1]}"
        assert text.isascii()


@given(st.binary(min_size=32, max_size=32))
def test_a_hash_alone_opens_nothing(noise: bytes) -> None:
    from maitred.identity.keys import matches

    parsed = parse(MADE.plaintext)
    assert parsed is not None
    assert matches(parsed[1], [MADE.secret], 0.0)
    assert not matches(hashlib.sha256(noise).hexdigest()[:43], [MADE.secret], 0.0)

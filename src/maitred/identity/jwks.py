"""Public keys of one identity provider, cached and fetched again for an unknown key id.

Token senders cannot control how often the provider is asked: there is at most one fetch at a time, with a minimum time
between two. While the provider cannot be reached, its last keys are used up to a configured age; after that its tokens
cannot be checked, so none is accepted.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import aiohttp
import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from maitred.core.clock import Clock
from maitred.core.errors import Unavailable
from maitred.identity.config import OidcConfig
from maitred.wire.loopback import is_trustworthy

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_LARGEST_BYTES = 1 << 20
_SHORTEST_RSA_BITS = 2048
_FAMILIES = {
    "RS": ("RSA", None),
    "PS": ("RSA", None),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
"""Key type and curve of each algorithm."""

Document = TypeVar("Document")
Fetch = Callable[[str], Awaitable[bytes]]


class _Discovery(msgspec.Struct):
    issuer: str
    jwks_uri: str


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


class _Fault(Exception):
    """The provider sent an answer without its keys."""


class SigningKeys:
    """Public keys of one provider.

    Args:
        name: Name of the provider in the configuration.
        config: Address of the provider and lifetime of its keys.
        clock: Clock for the age of the keys.
        fetch: Gets a document by its URL; tests pass their own.
    """

    def __init__(self, name: str, config: OidcConfig, clock: Clock, fetch: Fetch | None = None) -> None:
        self._name = name
        self._config = config
        self._clock = clock
        self._fetch = fetch or fetch_document
        self._keys: Mapping[tuple[str | None, str], jwt.PyJWK] = {}
        self._as_of_s: float | None = None
        self._next_s = clock.monotonic_s()
        self._asking: asyncio.Task[None] | None = None

    async def find(self, kid: str | None, algorithm: str) -> jwt.PyJWK | None:
        """Returns the key with this id for this algorithm; None if the provider has none.

        A fetch continues if its request is cancelled; `close` ends it.

        Raises:
            Unavailable: The keys are not known, or too old to be used.
        """
        if self.age_s > self._config.keys_ttl_s:
            self._ask()
        if not self._usable or (kid, algorithm) not in self._keys:
            self._ask()
            if self._asking is not None:
                await asyncio.wait([self._asking])
        if not self._usable:
            raise Unavailable(
                f"Tokens of {self._name!r} cannot be checked now, for its public keys are away. Try again shortly.",
                retry_after_s=max(1.0, self._next_s - self._clock.monotonic_s()),
            )
        return self._keys.get((kid, algorithm))

    async def close(self) -> None:
        """Ends a running fetch."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    @property
    def age_s(self) -> float:
        """Age of the keys in seconds; infinite before the first fetch."""
        return float("inf") if self._as_of_s is None else self._clock.monotonic_s() - self._as_of_s

    @property
    def _usable(self) -> bool:
        return self.age_s <= self._config.keys_max_stale_s

    def _ask(self) -> None:
        """Begins a fetch, unless one is running or the last one began too recently."""
        now_s = self._clock.monotonic_s()
        if self._asking is None and now_s >= self._next_s:
            self._next_s = now_s + self._config.keys_refetch_s
            self._asking = asyncio.create_task(self._renew(now_s), name=f"keys of {self._name}")

    async def _renew(self, asked_s: float) -> None:
        try:
            url = self._config.jwks_url or await self._discover()
            key_set = _read(await self._fetch(url), _KeySet)
            self._keys = _by_id(key_set.keys, self._config.algorithms)
            self._as_of_s = asked_s
        except (_Fault, aiohttp.ClientError, OSError, ValueError) as error:
            log.warning("The keys of %r could not be fetched: %s", self._name, str(error) or type(error).__name__)
        finally:
            self._asking = None

    async def _discover(self) -> str:
        """Returns the URL of the keys from the provider's discovery document."""
        issuer = self._config.issuer
        document = _read(await self._fetch(issuer.rstrip("/") + "/.well-known/openid-configuration"), _Discovery)
        if document.issuer != issuer:
            raise _Fault(f"It calls itself {document.issuer!r:.200}; set `issuer` to what it is.")
        if not is_trustworthy(document.jwks_uri):
            raise _Fault(f"Its keys are at {document.jwks_uri!r:.200}, which is not https.")
        return document.jwks_uri


async def fetch_document(url: str) -> bytes:
    """Returns the body at `url`. Redirects are not followed: they could lead to a host that can replace keys."""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(url, allow_redirects=False, headers={"accept": "application/json"}) as response,
    ):
        if response.status != 200:
            raise _Fault(f"{url} answers with status {response.status}.")
        body = bytearray()
        async for chunk in response.content.iter_chunked(1 << 16):
            body += chunk
            if len(body) > _LARGEST_BYTES:
                raise _Fault(f"{url} answers with more than {_LARGEST_BYTES:,} bytes.")
        return bytes(body)


def _read(body: bytes, kind: type[Document]) -> Document:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _Fault(f"It answers with something else than it should: {error}") from error


def _by_id(documents: list[dict[str, Any]], algorithms: tuple[str, ...]) -> dict[tuple[str | None, str], jwt.PyJWK]:
    """Returns every key by its id and by each algorithm that it supports.

    A token without a key id is checked with the key for its algorithm if there is exactly one.
    """
    found: dict[tuple[str | None, str], jwt.PyJWK] = {}
    fitting: dict[str, list[jwt.PyJWK]] = {algorithm: [] for algorithm in algorithms}
    for document in documents:
        for algorithm in algorithms:
            key = _key(document, algorithm)
            if key is not None:
                fitting[algorithm].append(key)
                kid = document.get("kid")
                if isinstance(kid, str):
                    found[kid, algorithm] = key
    for algorithm, keys in fitting.items():
        if len(keys) == 1:
            found[None, algorithm] = keys[0]
    return found


def _key(document: dict[str, Any], algorithm: str) -> jwt.PyJWK | None:
    kind, curve = _FAMILIES.get(algorithm) or _FAMILIES[algorithm[:2]]
    if document.get("kty") != kind or (curve is not None and document.get("crv") != curve):
        return None
    if document.get("use", "sig") != "sig" or document.get("alg", algorithm) != algorithm:
        return None
    try:
        key = jwt.PyJWK(document, algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        log.warning("A key of type %s that the provider publishes cannot be read; it is left out.", kind)
        return None
    if isinstance(key.key, RSAPublicKey) and key.key.key_size < _SHORTEST_RSA_BITS:
        log.warning("An RSA key of %d bits is too short to prove anything; it is left out.", key.key.key_size)
        return None
    return key

"""Tokens of identity providers instead of keys: signed JWTs, checked with public keys.

Before the signature check, the content of a token only selects one of the provider's published keys, and only for the
configured algorithms: a token cannot select ``none`` or an HMAC. The tenant in the claims is looked up again for every
request, so a disabled tenant is disabled for tokens too.
"""

import base64
import hashlib
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TypeVar

import jwt
import msgspec

from maitred.core.clock import Clock
from maitred.core.tenancy import Principal
from maitred.identity.claims import Claims, live, read_key, read_scopes, read_tenants
from maitred.identity.config import OidcConfig
from maitred.identity.directory import Directory
from maitred.identity.jwks import Fetch, SigningKeys

log = logging.getLogger(__name__)

_LONGEST_TOKEN = 16_384
_MOST_VERIFIED = 4_096
Document = TypeVar("Document")


class _Header(msgspec.Struct):
    alg: str
    kid: str | None = None


class _Issuer(msgspec.Struct):
    iss: str


class _Verified(msgspec.Struct, frozen=True):
    """A token with a valid signature, issuer and audience."""

    key: jwt.PyJWK
    claims: Claims


class OidcIssuers:
    """All configured identity providers.

    Implements `maitred.identity.identity.TokenIssuers`; use it as a context manager.

    Args:
        configs: The providers by the names that the configuration gives them, without faults (see `provider_faults`).
        directory: Directory of the callers' tenants.
        clock: Clock for the times in tokens and the age of keys.
        fetch: See `SigningKeys`.
    """

    def __init__(
        self, configs: Mapping[str, OidcConfig], directory: Directory, clock: Clock, fetch: Fetch | None = None
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._configs = {config.issuer: (name, config) for name, config in configs.items()}
        self._keys = {config.issuer: SigningKeys(name, config, clock, fetch) for name, config in configs.items()}
        # Verified tokens are cached, because a signature check is the slowest part here and clients send the same token
        # for an hour.
        self._verified: dict[bytes, _Verified] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for keys in self._keys.values():
            await keys.close()

    def is_issued(self, token: str) -> bool:
        """Whether a token names one of these issuers; as `TokenIssuers.is_issued`."""
        return _read_issuer(token) in self._configs

    async def principal_for(self, token: str) -> Principal | None:
        """Returns the principal of a token; as `TokenIssuers.principal_for`."""
        issuer = _read_issuer(token)
        header = _decode_segment(token.partition(".")[0], _Header)
        if issuer not in self._configs or header is None:
            return None
        name, config = self._configs[issuer]
        if header.alg not in config.algorithms:
            return None
        key = await self._keys[issuer].find(header.kid, header.alg)
        if key is None:
            return None
        claims = self._read_claims(token, header.alg, key, config)
        if claims is None or not live(claims, self._clock.wall_s(), config.leeway_s):
            return None
        subject = read_key(name, claims)
        # A list of groups usually contains groups that are not tenants here.
        tenant = next((name for name in read_tenants(claims, config) if self._directory.tenant(name) is not None), None)
        if subject is None or tenant is None:
            return None
        return self._directory.principal_in(tenant, key=subject, scopes=read_scopes(claims, config))

    def _read_claims(self, token: str, algorithm: str, key: jwt.PyJWK, config: OidcConfig) -> Claims | None:
        """Returns the claims if `key` signed them for us; their validity times are not checked."""
        digest = hashlib.sha256(token.encode("ascii")).digest()
        known = self._verified.get(digest)
        if known is not None and known.key is key:
            return known.claims
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=config.audience,
                issuer=config.issuer,
                # `live` checks the times with our own clock.
                options={"require": ["exp", "sub"], "verify_exp": False, "verify_nbf": False, "verify_iat": False},
            )
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            log.debug("A token of %s was not accepted: %s", config.issuer, type(error).__name__)
            return None
        self._verified.pop(digest, None)
        if len(self._verified) >= _MOST_VERIFIED:
            del self._verified[next(iter(self._verified))]
        self._verified[digest] = _Verified(key, claims)
        return claims


def _read_issuer(token: str) -> str | None:
    """Returns the issuer that a token names; None if it is no token."""
    if len(token) > _LONGEST_TOKEN or not token.isascii() or token.count(".") != 2:
        return None
    document = _decode_segment(token.split(".")[1], _Issuer)
    return document.iss if document is not None else None


def _decode_segment(segment: str, kind: type[Document]) -> Document | None:
    try:
        raw = base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4))
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None

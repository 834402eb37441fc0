"""From the headers of a request to whoever sent it.

The credential is taken from where the official clients put it: ``Authorization: Bearer`` (OpenAI), ``x-api-key``
(Anthropic), ``api-key`` (Azure). Where there are several, the first of these counts and the others are not looked at:
clients that talk to several services often have the others' keys set too.

Everything that is wrong with a credential gets the same answer, so nobody learns which keys exist. Nothing here waits
for a store, so nobody can load one with keys that do not exist.
"""

from collections.abc import Callable
from typing import Protocol

from maitred.core.clock import Clock
from maitred.core.errors import Unauthenticated
from maitred.core.tenancy import ApiKey, Principal, is_id
from maitred.identity.directory import Directory
from maitred.identity.keys import PREFIX, matches, parse

Header = Callable[[bytes], str | None]
"""The value of a request's header, by its name in lower case."""


class TokenIssuers(Protocol):
    """The identity providers whose tokens count as keys."""

    def issued(self, token: str) -> bool:
        """Whether the token claims to be of one of them; nothing is proved by that."""
        ...

    async def principal_for(self, token: str) -> Principal | None:
        """Who the token speaks for; None if it is not valid.

        Raises:
            Unavailable: The provider's keys are not known now, so nothing can be said.
        """
        ...


class Identity:
    """Tells who sent a request.

    Args:
        directory: The keys.
        clock: For their expiry.
        check_fresh: Raises StoreUnavailable if the directory is too old to be used.
        anonymous: Who a request without a credential comes from, and one with a made-up credential, since most clients
            insist on having one (``api_key="none"``). A credential that names itself one of ours, or a token of one of
            the issuers, must be valid nevertheless: its sender means to be somebody. None: nobody is anonymous.
        issuers: Whose tokens count; None: only keys do.
    """

    def __init__(
        self,
        directory: Directory,
        clock: Clock,
        *,
        check_fresh: Callable[[], None] = lambda: None,
        anonymous: Principal | None = None,
        issuers: TokenIssuers | None = None,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._check_fresh = check_fresh
        self._anonymous = anonymous
        self._issuers = issuers

    def reconfigure(self, anonymous: Principal | None) -> None:
        """Who a request without a credential comes from, from now on; None: nobody, and those inside must leave."""
        self._anonymous = anonymous

    async def identify(self, header: Header) -> Principal:
        """Who sent the request with these headers.

        Raises:
            Unauthenticated: There is no credential, or it is not valid here.
            Unavailable: Whether it is valid cannot be said now.
        """
        self._check_fresh()
        credential = read_credential(header)
        if credential is None:
            if self._anonymous is not None:
                return self._anonymous
            raise Unauthenticated("No API key was sent. Send one as `Authorization: Bearer sk-mtd-…` or `x-api-key`.")
        principal: Principal | None = None
        if credential.startswith(PREFIX):
            principal = self._key_owner(credential)
        elif self._issuers is not None and self._issuers.issued(credential):
            principal = await self._issuers.principal_for(credential)
        else:
            principal = self._anonymous
        if principal is None:
            raise Unauthenticated("This API key is not valid here. Check it, or ask for a new one.")
        return principal

    def is_still_valid(self, principal: Principal, header: Header) -> bool:
        """See `maitred.core.tenancy.Authenticator`. What proves to be somebody's does so until something changes."""
        self._check_fresh()
        return self._directory.is_still_valid(principal)

    def holds(self, principal: Principal) -> bool:
        """Whether who was let in before would still be: its key neither revoked nor expired, no tenant disabled.

        A token counts until its tenants are disabled: it cannot be revoked, and its end is that of new requests.
        """
        return self.refresh_principal(principal) is not None

    def refresh_principal(self, principal: Principal) -> Principal | None:
        """Who was let in before, as it would be let in now; None: it would not, see `holds`."""
        if principal is self._anonymous:
            return principal
        key = self._directory.key(principal.key)
        if key is not None:
            return None if self._expired(key) else self._directory.principal_for(key)
        if is_id(principal.key):
            return None  # it was a key, and is gone
        return self._directory.principal_in(principal.tenants[0], key=principal.key, scopes=principal.scopes)

    def _expired(self, key: ApiKey) -> bool:
        return key.expires_s is not None and self._clock.wall_s() >= key.expires_s

    def _key_owner(self, credential: str) -> Principal | None:
        parsed = parse(credential)
        if parsed is None:
            return None
        public_id, secret = parsed
        key = self._directory.key(public_id)
        now_s = self._clock.wall_s()
        # The secret first: only who holds it may learn, from the time that it takes, what became of the key.
        if not matches(secret, key.secrets if key is not None else (), now_s) or key is None:
            return None
        if self._expired(key):
            return None
        return self._directory.principal_for(key)


def read_credential(header: Header) -> str | None:
    """What the request says to prove who sent it; None if it says nothing."""
    authorization = header(b"authorization")
    if authorization is not None:
        scheme, _, credential = authorization.strip().partition(" ")
        if scheme.lower() == "bearer" and (credential := credential.strip()):
            return credential
    for name in (b"x-api-key", b"api-key"):
        value = header(name)
        if value is not None and (value := value.strip()):
            return value
    return None

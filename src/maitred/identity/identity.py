"""Identity: from the headers of a request to whoever sent it, by a directory that is kept fresh.

The credential is taken from where the official clients put it: ``Authorization: Bearer`` (OpenAI), ``x-api-key``
(Anthropic), ``api-key`` (Azure). Where there are several, the first of these counts and the others are not looked at:
clients that talk to several services often have the others' keys set too.

Everything that is wrong with a credential gets the same answer, so nobody learns which keys exist. Nothing here waits
for a store, so nobody can load one with keys that do not exist.

**Freshness.** A gateway asks a few times a second what has changed, so a revoked key is refused everywhere within a
second. While the store is away the gateway goes on with what it knows, and says how old that is. Knowledge that is too
old is no longer
used: a key that was revoked in the meantime must not work for ever.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from maitred.core.clock import Clock
from maitred.core.errors import StoreUnavailable, Unauthenticated
from maitred.core.tenancy import ApiKey, DirectorySource, Principal, is_id
from maitred.identity.directory import Directory
from maitred.identity.keys import PREFIX, matches, parse

log = logging.getLogger(__name__)

_POLL_TIMEOUT_S = 5.0
"""A store that does not answer is as good as one that is away."""


class DirectoryRefresher:
    """Brings changes from their source into the directory.

    Args:
        source: Where the directory is kept.
        directory: What is kept as new as the source.
        clock: For the age.
        every_s: Time between two questions. Changes take effect within this time and what one question takes.
        max_stale_s: Oldest knowledge that is used.
    """

    def __init__(
        self,
        source: DirectorySource,
        directory: Directory,
        clock: Clock,
        *,
        every_s: float = 0.3,
        max_stale_s: float = 3600.0,
    ) -> None:
        self._source = source
        self._directory = directory
        self._clock = clock
        self._every_s = every_s
        self._max_stale_s = max_stale_s
        self._as_of_s: float | None = None
        self._away = False
        self._listeners: list[Callable[[], object]] = []
        # Two answers at once could be applied in the wrong order, and bring a revoked key back for a moment.
        self._one_at_a_time = asyncio.Lock()

    def reconfigure(self, every_s: float, max_stale_s: float) -> None:
        """Goes by these from now on."""
        self._every_s = every_s
        self._max_stale_s = max_stale_s

    @property
    def age_s(self) -> float:
        """How old the directory may be: nothing that changed before that is missing. Infinite before it is loaded."""
        return float("inf") if self._as_of_s is None else self._clock.monotonic_s() - self._as_of_s

    @property
    def away(self) -> bool:
        """Whether the source could not be read when it was last asked."""
        return self._away

    def watch(self, listener: Callable[[], object]) -> None:
        """Has a function called whenever the source was asked: keys may have been revoked since, or have expired."""
        self._listeners.append(listener)

    def check(self) -> None:
        """Raises StoreUnavailable if the directory is too old to be used."""
        if self._as_of_s is None or self._clock.monotonic_s() - self._as_of_s > self._max_stale_s:
            raise StoreUnavailable(
                "Keys cannot be checked now: the store that keeps them has been away for too long. Try again shortly.",
                retry_after_s=max(1.0, self._every_s),
            )

    async def load(self) -> None:
        """Reads everything that is new; admin routes call it too, to see what they have just changed.

        Raises:
            StoreUnavailable: The source cannot be read now. The directory is what it was.
        """
        async with self._one_at_a_time:
            # What changes while the source answers may be missing, so the answer is as old as the question.
            asked_s = self._clock.monotonic_s()
            try:
                await self._read()
            except StoreUnavailable:
                self._away = True
                raise
            self._as_of_s = asked_s
            self._away = False

    async def run(self) -> None:
        """Asks until it is cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            was_away = self._away
            try:
                await self.load()
            except StoreUnavailable as error:
                if not was_away:
                    cause = str(error.__cause__ or "").strip().partition("\n")[0]
                    log.warning("Keys and limits are kept as they were %.1f s ago: %s", self.age_s, cause or error)
            except Exception:
                # Without this task revocations would stop unnoticed; the age tells of a fault that stays.
                if not was_away:
                    log.exception("Keys and limits are kept as they were %.1f s ago.", self.age_s)
                self._away = True
            else:
                if was_away:
                    log.info("Keys and limits are up to date again.")
            for listener in self._listeners:
                listener()

    async def _read(self) -> None:
        since = self._directory.version
        try:
            async with asyncio.timeout(_POLL_TIMEOUT_S):
                changes = await self._source.changes(since)
                if changes.version < since:
                    # An older store than the one we know, such as one restored from a backup.
                    self._directory.replace(await self._source.changes(0))
                elif changes.version > since:
                    self._directory.apply(changes)
        except TimeoutError:
            raise StoreUnavailable(f"The store did not answer within {_POLL_TIMEOUT_S:.0f} s.") from None


Header = Callable[[bytes], str | None]
"""The value of a request's header, by its name in lower case."""


class TokenIssuers(Protocol):
    """The identity providers whose tokens count as keys.

    A Protocol, because identity needs none of the libraries for tokens until a provider is configured.
    """

    def is_issued(self, token: str) -> bool:
        """Whether the token claims to be of one of them; nothing is proved by that."""
        ...

    async def principal_for(self, token: str) -> Principal | None:
        """Returns the principal of a token; None if it is not valid.

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
        """Sets the principal of requests without a credential; None: there is none, and those inside must leave."""
        self._anonymous = anonymous

    async def identify(self, header: Header) -> Principal:
        """Returns the principal that sent the request with these headers.

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
        elif self._issuers is not None and self._issuers.is_issued(credential):
            principal = await self._issuers.principal_for(credential)
        else:
            principal = self._anonymous
        if principal is None:
            raise Unauthenticated("This API key is not valid here. Check it, or ask for a new one.")
        return principal

    def is_still_valid(self, principal: Principal, header: Header) -> bool:
        """Whether a principal is still valid; a credential holds until something changes."""
        self._check_fresh()
        return self._directory.is_still_valid(principal)

    def holds(self, principal: Principal) -> bool:
        """Whether who was let in before would still be: its key neither revoked nor expired, no tenant disabled.

        A token counts until its tenants are disabled: it cannot be revoked, and its end is that of new requests.
        """
        return self.refresh_principal(principal) is not None

    def refresh_principal(self, principal: Principal) -> Principal | None:
        """Returns a principal as it would be let in now; None: it would not, see `holds`."""
        if principal is self._anonymous:
            return principal
        key = self._directory.key(principal.key)
        if key is not None:
            return None if self._is_expired(key) else self._directory.principal_for(key)
        if is_id(principal.key):
            return None  # it was a key, and is gone
        return self._directory.principal_in(principal.tenants[0], key=principal.key, scopes=principal.scopes)

    def _is_expired(self, key: ApiKey) -> bool:
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
        if self._is_expired(key):
            return None
        return self._directory.principal_for(key)


def read_credential(header: Header) -> str | None:
    """Returns the credential of a request; None if it has none."""
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

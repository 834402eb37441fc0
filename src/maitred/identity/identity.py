"""Authentication: finds the sender of a request from its headers, with a fresh directory.

The credential is taken from where the official clients put it: ``Authorization: Bearer`` (OpenAI), ``x-api-key``
(Anthropic), ``api-key`` (Azure). If there are several, only the first in this order is used: clients of several
services often send keys of the other services too.

Every invalid credential gets the same answer, so callers cannot learn which keys exist. Authentication never waits for
the store, so invalid keys cannot put load on the store.

A gateway asks for changes a few times a second, so every gateway refuses a revoked key within a second. While the store
cannot be reached, the gateway uses its copy and reports the age of the copy. A copy that is too old is no longer used,
so that a key that was revoked in the meantime stops working.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from maitred.core.clock import Clock
from maitred.core.errors import StoreUnavailable, Unauthenticated
from maitred.core.tenancy import ApiKey, DirectorySource, Principal, is_id
from maitred.identity.directory import Directory
from maitred.identity.keys import PREFIX, matches, parse, parse_foreign

log = logging.getLogger(__name__)

_POLL_TIMEOUT_S = 5.0
"""Timeout of one question in seconds; a store without an answer counts as unreachable."""
_SPACE = " \t"
"""White space around the value of a header (RFC 9110, section 5.5); other bytes may belong to a key."""


class DirectoryRefresher:
    """Copies changes from their source into the directory.

    Args:
        source: Source of the directory.
        directory: Directory that follows the source.
        clock: Clock for the age of the directory.
        every_s: Seconds between two questions. Changes take effect within this time plus the duration of one question.
        max_stale_s: Maximum age in seconds at which the directory is used.
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
        # Two concurrent answers could be applied in the wrong order and restore a revoked key for a moment.
        self._one_at_a_time = asyncio.Lock()

    def reconfigure(self, every_s: float, max_stale_s: float) -> None:
        """Applies new settings from now on."""
        self._every_s = every_s
        self._max_stale_s = max_stale_s

    @property
    def age_s(self) -> float:
        """Maximum age of the directory: it includes all changes before that time.

        Before the load the age is infinite.
        """
        return float("inf") if self._as_of_s is None else self._clock.monotonic_s() - self._as_of_s

    @property
    def away(self) -> bool:
        """Whether the source could not be read when it was last asked."""
        return self._away

    def watch(self, listener: Callable[[], object]) -> None:
        """Calls a function after each question, because keys may have been revoked or expired."""
        self._listeners.append(listener)

    def check(self) -> None:
        """Raises StoreUnavailable if the directory is too old to be used."""
        if self._as_of_s is None or self._clock.monotonic_s() - self._as_of_s > self._max_stale_s:
            raise StoreUnavailable(
                "Keys cannot be checked now: the store that keeps them has been away for too long. Try again shortly.",
                retry_after_s=max(1.0, self._every_s),
            )

    async def load(self) -> None:
        """Reads all new changes; admin routes call it too, to see their own changes.

        Raises:
            StoreUnavailable: The source cannot be read now. The directory is unchanged.
        """
        async with self._one_at_a_time:
            # Changes during the answer may be missing, so the age of the answer counts from the question.
            asked_s = self._clock.monotonic_s()
            try:
                await self._read()
            except StoreUnavailable:
                self._away = True
                raise
            self._as_of_s = asked_s
            self._away = False

    async def run(self) -> None:
        """Asks the source repeatedly until it is cancelled."""
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
                # This task must survive errors, because otherwise revocations would stop without notice; the age shows
                # a permanent fault.
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
                    # The store is older than our copy, for example after a restore from a backup.
                    self._directory.replace(await self._source.changes(0))
                elif changes.version > since:
                    self._directory.apply(changes)
        except TimeoutError:
            raise StoreUnavailable(f"The store did not answer within {_POLL_TIMEOUT_S:.0f} s.") from None


Header = Callable[[bytes], str | None]
"""Returns a request header's value by its name in lower case."""

SESSION_TOKEN_HEADER = b"x-maitred-console"
"""Header with the token of a session of the console, which comes in addition to its cookie."""


class TokenIssuers(Protocol):
    """The identity providers whose tokens count as keys.

    A Protocol, because the token libraries are imported only if a provider is configured.
    """

    def is_issued(self, token: str) -> bool:
        """Whether the token names one of the issuers, without any proof."""
        ...

    async def principal_for(self, token: str) -> Principal | None:
        """Returns the principal of a token; None if it is not valid.

        Raises:
            Unavailable: The provider's keys are unknown now, so the token cannot be checked.
        """
        ...


class Identity:
    """Authenticates the sender of a request.

    Args:
        directory: Directory of the keys.
        clock: Clock for the expiry of keys.
        check_fresh: Raises StoreUnavailable if the directory is too old to be used.
        anonymous: Principal of requests without a credential or with a placeholder credential, because most clients
            require one (``api_key="none"``). A credential that names itself one of ours, or a token of one of the
            issuers, must be valid nevertheless: its sender means to be somebody. None: nobody is anonymous.
        issuers: Issuers whose tokens are accepted; None: only keys are accepted.
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
        self._session_owner: Callable[[Header], Principal | None] | None = None

    def accept_sessions(self, session_owner: Callable[[Header], Principal | None] | None) -> None:
        """Accepts sessions of the console in place of keys from now on.

        Args:
            session_owner: Returns who opened the session that the headers name; None: they name none. If it is None
                itself, no session counts.
        """
        self._session_owner = session_owner

    def reconfigure(self, anonymous: Principal | None) -> None:
        """Sets the principal of anonymous requests; None refuses them and ends admitted ones."""
        self._anonymous = anonymous

    async def identify(self, header: Header) -> Principal:
        """Returns the principal that sent the request with these headers.

        A key in the request takes precedence over a session.

        Raises:
            Unauthenticated: The credential is missing or invalid.
            Unavailable: The credential cannot be checked now.
        """
        credential = read_credential(header)
        if credential is None and self._session_owner is not None and header(SESSION_TOKEN_HEADER):
            owner = self._session_owner(header)
            principal = None if owner is None else self.refresh_principal(owner)
            if principal is not None:
                return principal
        self._check_fresh()
        if credential is None:
            if self._anonymous is not None:
                return self._anonymous
            raise Unauthenticated("No API key was sent. Send one as `Authorization: Bearer sk-mtd-…` or `x-api-key`.")
        principal = None
        if credential.startswith(PREFIX):
            principal = self._key_owner(parse(credential))
        elif (foreign := self._foreign_key(credential)) is not None:
            principal = self._key_owner(foreign)
        elif self._issuers is not None and self._issuers.is_issued(credential):
            principal = await self._issuers.principal_for(credential)
        else:
            principal = self._anonymous
        if principal is None:
            raise Unauthenticated("This API key is not valid here. Check it, or ask for a new one.")
        return principal

    def is_still_valid(self, principal: Principal, header: Header) -> bool:
        """Whether a principal is still valid; a credential stays valid until the directory changes.

        A session can end at any time, so its principal must be identified again.
        """
        if self._session_owner is not None and header(SESSION_TOKEN_HEADER) is not None:
            return False
        self._check_fresh()
        return self._directory.is_still_valid(principal)

    def holds(self, principal: Principal) -> bool:
        """Whether a principal would still be accepted: its key is valid and its tenants are enabled.

        A token is valid until its tenants are disabled: it cannot be revoked, and its expiry only blocks new requests.
        """
        return self.refresh_principal(principal) is not None

    def refresh_principal(self, principal: Principal) -> Principal | None:
        """Returns a principal with its current settings; None: it is no longer valid, see `holds`."""
        if principal is self._anonymous:
            return principal
        key = self._directory.key(principal.key)
        if key is not None:
            return None if self._is_expired(key) else self._directory.principal_for(key)
        if is_id(principal.key):
            return None  # the key was deleted
        return self._directory.principal_in(principal.tenants[0], key=principal.key, scopes=principal.scopes)

    def _is_expired(self, key: ApiKey) -> bool:
        return key.expires_s is not None and self._clock.wall_s() >= key.expires_s

    def _foreign_key(self, credential: str) -> tuple[str, str] | None:
        """Returns the public id and the secret of a known key of another gateway."""
        parsed = parse_foreign(_sent_text(credential))
        return parsed if parsed is not None and self._directory.key(parsed[0]) is not None else None

    def _key_owner(self, parsed: tuple[str, str] | None) -> Principal | None:
        """Returns who has the key with this public id and secret; None if it is not valid."""
        if parsed is None:
            return None
        public_id, secret = parsed
        key = self._directory.key(public_id)
        now_s = self._clock.wall_s()
        # The secret is checked first: only its holder may learn the state of the key from the response time.
        if not matches(secret, key.secrets if key is not None else (), now_s) or key is None:
            return None
        if self._is_expired(key):
            return None
        return self._directory.principal_for(key)


def read_credential(header: Header) -> str | None:
    """Returns the credential of a request; None if it has none."""
    authorization = header(b"authorization")
    if authorization is not None:
        scheme, _, credential = authorization.strip(_SPACE).partition(" ")
        if scheme.lower() == "bearer" and (credential := credential.strip(_SPACE)):
            return credential
    for name in (b"x-api-key", b"api-key"):
        value = header(name)
        if value is not None and (value := value.strip(_SPACE)):
            return value
    return None


def _sent_text(value: str) -> str:
    """Returns the text of a header as its sender wrote it, in UTF-8; other bytes become surrogates."""
    return value if value.isascii() else value.encode("latin-1", "replace").decode("utf-8", "surrogateescape")

"""Sessions of the console: who is logged in, and how a session stands in for a key.

A browser must not keep a key: whatever can read its storage could take it away. So it shows the key once and gets a
session: 256 random bits in a cookie that scripts cannot read and that other sites' requests do not carry. The session
remembers whose key it was, and every request asks anew what that key may do, so revoking the key ends the session.

A cookie is sent without the page's doing. So it counts only beside a header with a second secret, the session's token,
which the page is told and no other site can read or send; that, and where the browser says a request comes from, is
the whole of the protection against forged requests. A request with a key of its own needs neither.
"""

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from maitred.core.clock import Clock
from maitred.core.tenancy import Principal
from maitred.identity.identity import Identity, read_credential

COOKIE = "maitred_session"
TOKEN_HEADER = b"x-maitred-console"
_PER_KEY = 16
"""Sessions of one key: who logs in again and again must not end those of others."""

Header = Callable[[bytes], str | None]
"""The value of a request's header, by its name in lower case."""


@dataclass(frozen=True, slots=True)
class ConsoleSession:
    """Session of one login."""

    principal: Principal
    token: str
    """What requests must say beside the cookie."""
    ends_s: float
    """Monotonic."""


class ConsoleSessions:
    """All sessions of this gateway.

    Args:
        clock: For their end.
        lasting_s: How long they last.
        most: How many there may be.
    """

    def __init__(self, clock: Clock, lasting_s: float, most: int) -> None:
        self._clock = clock
        self._lasting_s = lasting_s
        self._most = most
        self._sessions: dict[str, ConsoleSession] = {}
        """By the hash of the cookie, oldest first, which is also the order of their ends."""

    def reconfigure(self, lasting_s: float, most: int) -> None:
        """New ones last so long, and there may be so many."""
        self._lasting_s = lasting_s
        self._most = most

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, principal: Principal) -> tuple[str, ConsoleSession]:
        """Begins one. Returns what goes into the cookie, which is kept nowhere, and the session."""
        now_s = self._clock.monotonic_s()
        for name in [name for name, session in self._sessions.items() if session.ends_s <= now_s]:
            del self._sessions[name]
        own = [name for name, session in self._sessions.items() if session.principal.key == principal.key]
        for name in own[: max(0, len(own) - _PER_KEY + 1)]:
            del self._sessions[name]
        while len(self._sessions) >= self._most:
            del self._sessions[next(iter(self._sessions))]
        cookie = secrets.token_urlsafe(32)
        session = ConsoleSession(principal, secrets.token_urlsafe(32), now_s + self._lasting_s)
        self._sessions[_hash_token(cookie)] = session
        return cookie, session

    def session_for(self, header: Header) -> ConsoleSession | None:
        """The session that a request's cookie names; None if there is none."""
        cookie = _cookie_in(header(b"cookie") or "")
        session = self._sessions.get(_hash_token(cookie)) if cookie else None
        return session if session is not None and self._clock.monotonic_s() < session.ends_s else None

    def close(self, header: Header) -> None:
        """Ends the one that a request's cookie names, if there is one."""
        self._sessions.pop(_hash_token(_cookie_in(header(b"cookie") or "")), None)


class SessionIdentity:
    """Knows who calls by a session, too. Implements `maitred.core.tenancy.Authenticator`.

    Args:
        identity: Knows callers by keys, and whom sessions stand for.
        sessions: Those that are open.
    """

    def __init__(self, identity: Identity, sessions: ConsoleSessions) -> None:
        self._identity = identity
        self._sessions = sessions

    async def identify(self, header: Header) -> Principal:
        """Returns the principal of a session or a key.

        A key that is shown counts first; a cookie without its token does not count.
        """
        token = header(TOKEN_HEADER)
        if token and read_credential(header) is None and same_origin(header):
            session = self._sessions.session_for(header)
            if session is not None and secrets.compare_digest(token.encode(), session.token.encode()):
                principal = self._identity.refresh_principal(session.principal)
                if principal is not None:
                    return principal
        return await self._identity.identify(header)

    def is_still_valid(self, principal: Principal, header: Header) -> bool:
        """Whether a principal is still valid; False for one of a session, which can end at any time."""
        return header(TOKEN_HEADER) is None and self._identity.is_still_valid(principal, header)


def same_origin(header: Header) -> bool:
    """Whether the browser says that a page of this very server sends the request, as far as it says anything."""
    if header(b"sec-fetch-site") not in (None, "same-origin", "none"):
        return False
    origin = header(b"origin")
    return origin is None or urlsplit(origin).netloc.lower() == (header(b"host") or "").lower()


def _cookie_in(cookies: str) -> str:
    for pair in cookies.split(";"):
        name, _, value = pair.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


def _hash_token(cookie: str) -> str:
    return hashlib.sha256(cookie.encode("utf-8", "replace")).hexdigest()

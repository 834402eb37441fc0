"""Sessions of the console: who is logged in, and how a session replaces a key.

A browser must not keep a key, because any code that can read its storage could steal it. So it sends the key once and
gets a session: 256 random bits in a cookie that scripts cannot read and that requests of other sites do not carry. The
session records the owner of the key, and every request checks again what that key may do, so revoking the key ends the
session.

A browser sends a cookie automatically. So it counts only together with a header that has a second secret, the session's
token. The page receives the token; no other site can read or send it. The token and the origin that the browser reports
are the whole protection against forged requests. A request with a key of its own needs neither.
"""

import hashlib
import secrets
from collections import Counter
from dataclasses import dataclass
from urllib.parse import urlsplit

from maitred.core.clock import Clock
from maitred.core.tenancy import Principal, Scope
from maitred.identity.identity import SESSION_TOKEN_HEADER, Header

COOKIE = "maitred_session"
_PER_KEY = 16
"""Most sessions of one key, so that repeated logins with one key cannot end the sessions of others."""


@dataclass(frozen=True, slots=True)
class ConsoleSession:
    """Session of one login."""

    principal: Principal
    token: str
    """Token that requests must send in addition to the cookie."""
    ends_s: float
    """Monotonic time at which the session ends."""


class ConsoleSessions:
    """Sessions of this gateway.

    Args:
        clock: Clock for the end of sessions.
        lasting_s: Duration of a session.
        most: Largest number of sessions.
    """

    def __init__(self, clock: Clock, lasting_s: float, most: int) -> None:
        self._clock = clock
        self._lasting_s = lasting_s
        self._most = most
        self._sessions: dict[str, ConsoleSession] = {}
        """By the hash of the cookie, oldest first, which is also the order of their ends."""

    def reconfigure(self, lasting_s: float, most: int) -> None:
        """Sets the duration of new sessions, and the largest number of sessions."""
        self._lasting_s = lasting_s
        self._most = most

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, principal: Principal) -> tuple[str, ConsoleSession]:
        """Opens a session; returns it and the value of its cookie, which is not stored anywhere."""
        now_s = self._clock.monotonic_s()
        for name in [name for name, session in self._sessions.items() if session.ends_s <= now_s]:
            del self._sessions[name]
        own = [name for name, session in self._sessions.items() if session.principal.key == principal.key]
        for name in own[: max(0, len(own) - _PER_KEY + 1)]:
            del self._sessions[name]
        while len(self._sessions) >= self._most:
            del self._sessions[self._find_evictable()]
        cookie = secrets.token_urlsafe(32)
        session = ConsoleSession(principal, secrets.token_urlsafe(32), now_s + self._lasting_s)
        self._sessions[_hash_token(cookie)] = session
        return cookie, session

    def _find_evictable(self) -> str:
        """Returns the oldest session of the organisation that has the most; one of an operator only if all are."""
        counts = Counter(session.principal.tenants[-1] for session in self._sessions.values())

        def rank(name: str) -> tuple[bool, int]:
            principal = self._sessions[name].principal
            return Scope.ADMIN in principal.scopes, -counts[principal.tenants[-1]]

        return min(self._sessions, key=rank)

    def session_for(self, header: Header) -> ConsoleSession | None:
        """Returns the session that a request's cookie names; None if there is none."""
        cookie = _cookie_in(header(b"cookie") or "")
        session = self._sessions.get(_hash_token(cookie)) if cookie else None
        return session if session is not None and self._clock.monotonic_s() < session.ends_s else None

    def owner(self, header: Header) -> Principal | None:
        """Returns who opened the session that a request's cookie and token name; None if they name none.

        A cookie without its token does not count, and a request from a page of another site does not either.
        """
        token = header(SESSION_TOKEN_HEADER)
        if not token or not same_origin(header):
            return None
        session = self.session_for(header)
        if session is None or not secrets.compare_digest(token.encode(), session.token.encode()):
            return None
        return session.principal

    def close(self, header: Header) -> None:
        """Ends the session that a request's cookie names, if there is one."""
        self._sessions.pop(_hash_token(_cookie_in(header(b"cookie") or "")), None)


def same_origin(header: Header) -> bool:
    """Whether the browser reports the same origin for the request, or reports none."""
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

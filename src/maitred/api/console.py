"""Routes of the web console: its files, login, logout and the state of the session.

The pages read and change everything else through the same routes as other clients, with a session instead of a key.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from maitred import __version__
from maitred.api.dialect import Header
from maitred.api.exchange import JSON, HttpExchange
from maitred.api.health import VersionInfo
from maitred.api.routes import Route
from maitred.core.errors import Forbidden, RouteNotFound, Unauthenticated
from maitred.core.tenancy import Authenticator, Principal, Scope
from maitred.wire.admin.live import UseBody

ROOT = "/console"
_INDEX = "index.html"
_HEADERS: Sequence[Header] = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)
"""These headers forbid content of other sites, inline scripts, framing and referrers."""
_KEY = "Bearer sk-mtd-"
_PRIVATE: Sequence[Header] = ((b"cache-control", b"no-store"),)


class StaticFile(Protocol):
    """A file of the console.

    A Protocol, because `api` does not import `console`.
    """

    @property
    def body(self) -> bytes:
        """Bytes of the whole file."""
        ...

    @property
    def content_type(self) -> str:
        """Content type of the body."""
        ...

    @property
    def tag(self) -> str:
        """Entity tag of the body, in quotes."""
        ...


class LoginSession(Protocol):
    """Session of a user who is logged in.

    A Protocol, because `api` does not import `console`.
    """

    @property
    def principal(self) -> Principal:
        """Principal who is logged in."""
        ...

    @property
    def token(self) -> str:
        """Token that requests must send beside the cookie."""
        ...


S = TypeVar("S", bound=LoginSession, covariant=True)


class LoginSessions(Protocol[S]):
    """Store of the login sessions.

    A Protocol, because `api` does not import `console`.
    """

    def open(self, principal: Principal) -> tuple[str, S]:
        """Begins a session. Returns the value of the cookie, and the session."""
        ...

    def session_for(self, header: Callable[[bytes], str | None]) -> S | None:
        """Returns the session that a request's cookie names; None if there is none."""
        ...

    def close(self, header: Callable[[bytes], str | None]) -> None:
        """Ends the session of a request."""
        ...


class OwnModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of one model by a key."""

    model: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    cost_usd: float


class OwnUseBody(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of a key, and how far its own limits and those of its tenants are used."""

    days: int
    models: list[OwnModelBody]
    limits: dict[str, list[UseBody]]
    """Limits of the key and its tenants, by subject."""


class WhoBody(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of the user who is logged in."""

    key: str
    tenant: str
    scopes: list[Scope]
    anonymous: bool
    """Whether the server requires no key."""
    token: str
    """Token that requests with changes must send in the header ``x-maitred-console``; empty without a session."""
    version: str


class ConsoleRoutes:
    """Routes of the console: its pages, login, logout, and the caller's own usage.

    Args:
        pages: All files of the console, by their names below ``/console/``.
        sessions: The store of login sessions.
        identity: Identifies the owner of a key.
        again: Returns the current principal of a session; None: its key is not valid any more.
        same_origin: Returns whether a request comes from a page of this server, as far as its headers show.
        own_use: Returns the usage of a principal.
        cookie: The name of the session cookie.
        session_s: How long a session lasts, in seconds.
    """

    def __init__(
        self,
        pages: Mapping[str, StaticFile],
        sessions: LoginSessions[LoginSession],
        identity: Authenticator,
        again: Callable[[Principal], Principal | None],
        same_origin: Callable[[Callable[[bytes], str | None]], bool],
        own_use: Callable[[Principal], Awaitable[OwnUseBody]],
        *,
        cookie: str,
        session_s: float,
    ) -> None:
        self._pages = pages
        self._sessions = sessions
        self._identity = identity
        self._again = again
        self._same_origin = same_origin
        self._own_use = own_use
        self._cookie = cookie
        self._session_s = session_s

    def routes(self) -> list[Route]:
        """Returns the routes of the console.

        Only the console's pages use these routes, so they are not part of the API description.
        """
        session = f"{ROOT}/session"
        return [
            Route("GET", "/", self.root, "The way to the console, or the version of maitred.", returns=VersionInfo),
            Route("GET", ROOT, self.index, "The console.", content_type="text/html"),
            Route("GET", f"{ROOT}/", self.index, "The console.", content_type="text/html"),
            Route("GET", f"{ROOT}/{{file}}", self.file, "A file of the console.", content_type="text/plain"),
            Route("GET", session, self.who, "Who is logged in.", returns=WhoBody),
            Route("POST", session, self.log_in, "Gives a session for a key.", returns=WhoBody),
            Route("DELETE", session, self.log_out, "Ends the session."),
            Route(
                *("GET", f"{ROOT}/use", self.use, "What the caller used."), returns=OwnUseBody, needs=Scope.INFERENCE
            ),
        ]

    async def root(self, exchange: HttpExchange) -> None:
        """Redirects a browser to the console; answers others with the version."""
        if "text/html" in (exchange.header(b"accept") or ""):
            await exchange.respond(b"", status=303, headers=[(b"location", ROOT.encode())])
        else:
            await exchange.respond(msgspec.json.encode(VersionInfo(__version__)))

    async def index(self, exchange: HttpExchange) -> None:
        """Answers with the console's page.

        Its address ends without a slash, so the page names the addresses of its files in full.
        """
        await self._send(exchange, _INDEX)

    async def file(self, exchange: HttpExchange) -> None:
        """Answers with any other file of the console."""
        await self._send(exchange, exchange.parameter)

    async def who(self, exchange: HttpExchange) -> None:
        """Answers with the user of the session or key; ``null`` if there is none and a key is required."""
        session = self._sessions.session_for(exchange.header) if self._same_origin(exchange.header) else None
        principal = None if session is None else self._again(session.principal)
        token = "" if session is None or principal is None else session.token
        if principal is None:
            try:
                principal = await self._identity.identify(exchange.header)
            except Unauthenticated:  # not an error: the page asks this before it shows the login form
                await _private(exchange, None)
                return
        await self._tell(exchange, principal, token)

    async def log_in(self, exchange: HttpExchange) -> None:
        """Logs in with an API key, which is sent as OpenAI's clients send it, and answers with a cookie.

        Raises:
            Unauthenticated: The header has no API key, or the key is not valid.
            Forbidden: The request comes from a page of another site.
        """
        self._check_origin(exchange)
        if not (exchange.header(b"authorization") or "").startswith(_KEY):
            # A token of an identity provider is refused, too: it ends when the provider decides, and a session would
            # not notice.
            raise Unauthenticated("Log in with an API key. It begins with sk-mtd-.")
        principal = await self._identity.identify(exchange.header)
        cookie, session = self._sessions.open(principal)
        await self._tell(exchange, principal, session.token, [self._set_cookie(exchange, cookie, self._session_s)])

    async def log_out(self, exchange: HttpExchange) -> None:
        """Ends the session and deletes the cookie."""
        self._check_origin(exchange)
        self._sessions.close(exchange.header)
        await exchange.respond(b"{}", headers=[*_PRIVATE, self._set_cookie(exchange, "", 0)])

    async def use(self, exchange: HttpExchange) -> None:
        """Answers with the caller's usage and its remaining limits."""
        await _private(exchange, await self._own_use(exchange.principal))

    async def _send(self, exchange: HttpExchange, name: str) -> None:
        page = self._pages.get(name)
        if page is None:
            raise RouteNotFound(f"The console has no file {name[:200]!r}. It is at {ROOT}.")
        # The browser asks for the file at every visit and gets it only if it has changed.
        headers = [*_HEADERS, (b"etag", page.tag.encode()), (b"cache-control", b"no-cache")]
        if exchange.header(b"if-none-match") == page.tag:
            await exchange.respond(b"", status=304, content_type=page.content_type.encode(), headers=headers)
        else:
            await exchange.respond(page.body, content_type=page.content_type.encode(), headers=headers)

    async def _tell(
        self, exchange: HttpExchange, principal: Principal, token: str, headers: Sequence[Header] = ()
    ) -> None:
        body = WhoBody(
            key=principal.key,
            tenant=principal.tenants[0],
            scopes=sorted(principal.scopes),
            anonymous=not token,
            token=token,
            version=__version__,
        )
        await _private(exchange, body, headers)

    def _check_origin(self, exchange: HttpExchange) -> None:
        if not self._same_origin(exchange.header):
            raise Forbidden("The console takes this from its own page only.")

    def _set_cookie(self, exchange: HttpExchange, value: str, lasting_s: float) -> Header:
        secure = "; Secure" if (exchange.header(b"origin") or "").startswith("https:") else ""
        text = f"{self._cookie}={value}; Path=/; Max-Age={int(lasting_s)}; HttpOnly; SameSite=Strict{secure}"
        return b"set-cookie", text.encode("ascii")


async def _private(exchange: HttpExchange, body: Any, headers: Sequence[Header] = ()) -> None:  # noqa: ANN401 - any struct
    await exchange.respond(msgspec.json.encode(body), content_type=JSON, headers=[*_PRIVATE, *headers])

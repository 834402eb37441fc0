"""The web console, put together: its routes, and an identity that knows its sessions, too."""

from collections.abc import Awaitable, Callable

from maitred.api.console import ConsoleRoutes, OwnUseBody
from maitred.api.routes import Route
from maitred.console.config import ConsoleConfig
from maitred.console.pages import pages
from maitred.console.sessions import COOKIE, ConsoleSessions, SessionIdentity, same_origin
from maitred.core.tenancy import Authenticator, Principal
from maitred.identity.identity import Identity


def open_console(
    config: ConsoleConfig,
    identity: Identity,
    sessions: ConsoleSessions,
    own_use: Callable[[Principal], Awaitable[OwnUseBody]],
) -> tuple[list[Route], Authenticator]:
    """The routes of the console, and who tells callers apart; without a console, none, and who did before."""
    if not config.enabled:
        return [], identity
    routes = ConsoleRoutes(
        *(pages(), sessions, identity, identity.refresh_principal, same_origin, own_use),
        cookie=COOKIE,
        session_s=config.session_s,
    )
    return routes.routes(), SessionIdentity(identity, sessions)

"""Routes of the configuration: show the current configuration, and reload it."""

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.service import ConfigService
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.tenancy import Scope
from maitred.wire.admin.decode import decode_body
from maitred.wire.admin.requests import ReloadConfig
from maitred.wire.admin.responses import ConfigBody, ReloadBody

PATH = "/admin/v1/config"


class ConfigRoutes:
    """Admin routes of the configuration.

    Args:
        admin: The parts that admin routes share.
        configuration: The configuration of this gateway.
    """

    def __init__(self, admin: DirectoryAdmin, configuration: ConfigService) -> None:
        self._admin = admin
        self._config = configuration

    def routes(self) -> list[Route]:
        """Returns the routes in the order of the documentation."""
        return [
            Route(
                "GET",
                PATH,
                self.show,
                "The configuration in force, with origins and without secrets.",
                returns=ConfigBody,
                needs=Scope.ADMIN,
            ),
            Route(
                "POST",
                f"{PATH}/reload",
                self.reload,
                "Reads the configuration again and puts it in force, or says what that would change.",
                reads=ReloadConfig,
                returns=ReloadBody,
                needs=Scope.ADMIN,
            ),
        ]

    async def show(self, exchange: HttpExchange) -> None:
        """Answers with the configuration that is in force."""
        await self._admin.reply(exchange, self._config.running())

    async def reload(self, exchange: HttpExchange) -> None:
        """Reloads the configuration, or only checks it, and answers with the changes."""
        asked = decode_body(exchange.body, ReloadConfig)
        await self._admin.reply(exchange, await self._config.reload(dry_run=asked.dry_run))

"""Routes of the last requests: what happened to each."""

from collections.abc import Sequence
from typing import Protocol

from maitred.api.admin.office import Office
from maitred.api.call import Call
from maitred.api.routes import Route
from maitred.core.tenancy import Scope
from maitred.wire.admin.responses import StoryBody, StoryHead, StoryList

PATH = "/admin/v1/requests"


class Stories(Protocol):
    """The last requests of this gateway that have ended."""

    def latest(self) -> Sequence[StoryHead]:
        """All of them, the latest first."""
        ...

    def of(self, request_id: str) -> StoryBody:
        """The latest of that id; raises ResourceNotFound where none is known."""
        ...


class RequestRoutes:
    """The last requests.

    Args:
        office: What the routes share.
        stories: Those of this gateway.
    """

    def __init__(self, office: Office, stories: Stories) -> None:
        self._office = office
        self._stories = stories

    def routes(self) -> list[Route]:
        """The routes, in the order of the documentation."""
        return [
            Route("GET", PATH, self.list, "The last requests of this gateway.", returns=StoryList, needs=Scope.ADMIN),
            Route(
                *("GET", f"{PATH}/{{id}}", self.get, "What happened to one of them, in order."),
                returns=StoryBody,
                needs=Scope.ADMIN,
            ),
        ]

    async def list(self, call: Call) -> None:
        """All that are known."""
        await self._office.reply(call, StoryList(data=[*self._stories.latest()]))

    async def get(self, call: Call) -> None:
        """One."""
        await self._office.reply(call, self._stories.of(call.parameter))

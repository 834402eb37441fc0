"""The administration's API from the command line: one call, and a sentence for every failure."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from maitred.cli.client import CONNECT_TIMEOUT_S, bearer, open_client, refusal, server_root
from maitred.core.errors import Conflict, InvalidRequest

_TIMEOUT_S = 60.0
_PAGE = 200
_UNKNOWN_SERVER = "has no administration"

T = TypeVar("T")
Entry = TypeVar("Entry")


class ListPage(Protocol[Entry]):
    """Page of any list that the admin API answers with."""

    @property
    def data(self) -> list[Entry]:
        """Entries of the page."""
        ...

    @property
    def next(self) -> str | None:
        """Where the next page begins."""
        ...


class AdminClient:
    """Talks to the administration of one server; an async context manager that owns the connections.

    Args:
        url: Where the server is.
        key: With the scope admin.

    Raises:
        InvalidRequest: That is no address, or no key.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self._url = server_root(url)
        if not key:
            raise InvalidRequest(
                "An admin key is needed: set MAITRED_ADMIN_KEY, or pass --key. `maitred serve` prints one when it "
                "starts for the first time."
            )
        self._headers = {**bearer(key, "MAITRED_ADMIN_KEY"), "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self, path: str, answer: type[T], query: Mapping[str, str | None] | None = None) -> T:
        """Reads a resource of the admin API.

        Args:
            path: Below ``/admin/v1/``.
            answer: What comes back.
            query: None stands for what was not given.

        Raises:
            MaitredError: Refused, not there, or not maitred.
        """
        with open_client(self._url, _UNKNOWN_SERVER):
            return msgspec.json.decode(await self.raw("GET", path, query=query), type=answer)

    async def send(
        self,
        method: str,
        path: str,
        answer: type[T],
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str | None] | None = None,
    ) -> T:
        """Changes something; the rest as `get`."""
        with open_client(self._url, _UNKNOWN_SERVER):
            return msgspec.json.decode(await self.raw(method, path, query=query, body=body), type=answer)

    async def every(
        self, path: str, page: type[ListPage[Entry]], query: Mapping[str, str | None] | None = None
    ) -> AsyncIterator[Entry]:
        """All entries of a list, page by page."""
        after: str | None = None
        while True:
            answer = await self.get(path, page, {**(query or {}), "limit": str(_PAGE), "after": after})
            for entry in answer.data:
                yield entry
            if answer.next is None:
                return
            after = answer.next

    async def raw(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | None] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> bytes:
        """The answer as it came."""
        parameters = {name: value for name, value in (query or {}).items() if value is not None}
        address = f"{self._url}/admin/v1/{path}"
        with open_client(self._url, _UNKNOWN_SERVER):
            try:
                data = None if body is None else msgspec.json.encode(body)
                async with self._session.request(method, address, params=parameters, data=data) as response:
                    answer = await response.read()
            except UnicodeEncodeError as error:
                raise InvalidRequest("The arguments are not UTF-8 text. Check the terminal's encoding.") from error
        if response.status == 409:
            raise Conflict(refusal(409, answer).message)
        if response.status != 200:
            raise refusal(response.status, answer)
        return answer


def in_path(text: str) -> str:
    """An id as a part of a path."""
    return quote(text, safe="")


def administer(url: str, key: str | None, work: Callable[[AdminClient], Awaitable[T]]) -> T:
    """Runs one command's calls."""

    async def run() -> T:
        async with AdminClient(url, key) as client:
            return await work(client)

    return asyncio.run(run())

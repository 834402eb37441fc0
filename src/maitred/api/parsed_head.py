"""Parsed request heads, read once for all requests of a connection that have the same.

A client repeats its head with each request (see `maitred.api.http.head_cache`). What follows from it alone, or from it
and the
configuration, is kept with it: which route it leads to, who has proved to be its sender, what its headers ask for.
"""

from collections.abc import Mapping
from typing import Any

from maitred.api.headers import Headers
from maitred.api.priority_headers import retries_in
from maitred.api.routes import Route, RouteTable
from maitred.core.tenancy import Principal

KEPT = "maitred.kept"
"""The key under a scope's `extensions` of what is kept with its head; where there is none, its head is not repeated."""
_GREETING = "greeting"
_NONE: Mapping[str, Any] = {}


class ParsedHead:
    """Head of a request with what follows from it alone.

    Args:
        header: Its headers. Of a head that is repeated, the length of the body is that of the first request.

    Attributes:
        explain: Whether the answer is to tell what the request waited for.
        offered_id: What the client calls the request.
        repeat_key: What it calls it and its repeats; None: it does not repeat it, or leaves it open.
        retries: How often it says to have sent it before.
        route: Where it leads by a table, with the part of the path that the route leaves open; None: nobody has looked.
        principal: Who its credential was found to be of; None: nobody has looked. Whether that still holds has to be
            asked (see `Identifying.stands`).
    """

    __slots__ = ("explain", "header", "offered_id", "principal", "repeat_key", "retries", "route")

    def __init__(self, header: Headers) -> None:
        self.header = header
        explain = header(b"x-maitred-explain")
        self.explain = explain is not None and explain.strip().lower() in ("true", "1")
        self.offered_id = header(b"x-request-id")
        self.repeat_key = header(b"idempotency-key")
        self.retries = retries_in(header)
        self.route: tuple[RouteTable, Route, str] | None = None
        self.principal: Principal | None = None


def parsed_head(scope: Mapping[str, Any]) -> ParsedHead:
    """Returns the parsed head of a request, cached where its head repeats."""
    kept: dict[str, ParsedHead] | None = (scope.get("extensions") or _NONE).get(KEPT)
    if kept is None:
        return ParsedHead(Headers(scope["headers"]))
    parsed_head = kept.get(_GREETING)
    if parsed_head is None:
        parsed_head = kept[_GREETING] = ParsedHead(Headers(scope["headers"]))
    return parsed_head

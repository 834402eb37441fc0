"""The table of routes: which handler answers which method and path.

Most paths are matched whole, by one dictionary look-up. A path may have one parameter: ``{name}`` at the end takes any
rest, slashes included, because a model's name may hold them; in the middle it takes one segment, as in
``/admin/v1/keys/{id}/rotate``. Where both fit, the parameter in the middle wins.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import UnionType
from typing import Any

import msgspec

from maitred.api.dialect import OPENAI, ApiDialect
from maitred.core.errors import MethodNotAllowed, RouteNotFound
from maitred.core.tenancy import Scope

Handler = Callable[[Any], Awaitable[None]]
"""Takes an `HttpExchange`, whose module imports this one."""


@dataclass(frozen=True, slots=True)
class Route:
    """One operation, with what its description in ``/openapi.json`` needs.

    Attributes:
        path: May hold one ``{name}``.
        reads: The struct of the request body. Calls with a body are work: they count as in flight, and drain.
        returns: The struct of the answer; None when it is not made from one.
        streams: The struct of a streamed chunk.
        content_type: Of an answer that is not made from a struct.
        needs: The scope that the caller's key must have; None: everybody may.
        query: The struct of the query's parameters, whose fields are described.
        also: Another content type, of text, that the caller can choose.
        idempotent: Takes an ``Idempotency-Key``.
        repeat_handler: Handler of calls with an ``Idempotency-Key``; None: the key changes nothing.
        remembers: Takes one, too, and keeps its replies itself.
        dialect: Of the API that it belongs to.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    reads: type | None = None
    returns: type | None = None
    streams: type | UnionType | None = None
    content_type: str = "application/json"
    needs: Scope | None = None
    query: type[msgspec.Struct] | None = None
    also: str = ""
    idempotent: bool = False
    repeat_handler: Handler | None = None
    remembers: bool = False
    dialect: ApiDialect = OPENAI


@dataclass(frozen=True, slots=True)
class _Pattern:
    """All routes of one path with a parameter."""

    prefix: str
    suffix: str
    methods: dict[str, Route]

    def parameter_in(self, path: str) -> str:
        """Returns the text in the place of the parameter; empty if the path is another one."""
        if not path.startswith(self.prefix) or not path.endswith(self.suffix):
            return ""
        parameter = path[len(self.prefix) : len(path) - len(self.suffix)]
        return "" if self.suffix and "/" in parameter else parameter


class RouteTable:
    """Finds the route of a call."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._exact: dict[str, dict[str, Route]] = {}
        patterns: dict[tuple[str, str], dict[str, Route]] = {}
        for route in self.routes:
            prefix, brace, rest = route.path.partition("{")
            suffix = rest.partition("}")[2]
            methods = patterns.setdefault((prefix, suffix), {}) if brace else self._exact.setdefault(route.path, {})
            methods[route.method] = route
        # The more a pattern says of a path, the earlier it is tried.
        self._patterns = [
            _Pattern(prefix, suffix, patterns[prefix, suffix])
            for prefix, suffix in sorted(patterns, key=lambda parts: (-len(parts[1]), -len(parts[0])))
        ]

    def find(self, method: str, path: str) -> tuple[Route, str]:
        """The route, and the part of the path that stands for its parameter, if it has one.

        Raises:
            RouteNotFound: No route has this path.
            MethodNotAllowed: Routes have it, with other methods.
        """
        methods, parameter = self._exact.get(path), ""
        if methods is None:
            methods, parameter = self._match(path)
        if not methods:
            raise RouteNotFound(f"There is no path {path[:200]!r} here. GET /openapi.json lists the routes.")
        # HEAD is GET whose body is not sent.
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            raise MethodNotAllowed(f"{path[:200]} does not take {method[:20]}; it takes {', '.join(methods)}.")
        return route, parameter

    def methods_of(self, path: str) -> list[str]:
        """The methods that this path takes, for the ``Allow`` header of a 405."""
        methods = self._exact.get(path) or self._match(path)[0]
        return [*methods, "HEAD"] if "GET" in methods else list(methods)

    def _match(self, path: str) -> tuple[dict[str, Route], str]:
        """Returns the routes of a path with a parameter, and the parameter."""
        for pattern in self._patterns:
            if parameter := pattern.parameter_in(path):
                return pattern.methods, parameter
        return {}, ""

"""Route table: finds the handler of a method and a path.

Most paths are matched as a whole, by one dictionary look-up. A path may have one parameter: ``{name}`` at the end
matches any rest of the path, slashes included, because the name of a model may contain slashes; in the middle it
matches one segment, as in ``/admin/v1/keys/{id}/rotate``. If both match, the parameter in the middle wins. A path may
have two parameters, each of one segment: ``/v1/conversations/{id}/items/{item}``.

A path that has no route is tried as a path below ``/v1``: clients differ in whether a base URL ends with ``/v1`` or
with a slash. All other paths have one spelling, because proxies decide by it who may reach them.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any

import msgspec

from maitred.api.dialect import OPENAI, ApiDialect
from maitred.api.unsupported_path import advise
from maitred.core.errors import MethodNotAllowed, RouteNotFound
from maitred.core.tenancy import Scope

_SLASHES = re.compile("//+")

Handler = Callable[[Any], Awaitable[None]]
"""Handler of an `HttpExchange`; it is typed `Any` because the exchange's module imports this module."""


@dataclass(frozen=True, slots=True)
class Route:
    """One operation of the API, with the data for its description in ``/openapi.json``.

    Attributes:
        path: The path, which may contain one ``{name}``, or two of which the second is the end.
        reads: The struct of the request body. Requests with a body do work, so they count as in flight and are drained.
        returns: The struct of the response; None: the response is not made from a struct.
        streams: The struct of a streamed chunk.
        content_type: Content type of a response that is not made from a struct.
        needs: The scope that the caller's key must have; None: no key is needed.
        query: The struct of the query's parameters, whose fields are described.
        also: Another text content type that the caller can choose.
        idempotent: Whether it takes an ``Idempotency-Key``.
        repeat_handler: Handler of requests with an ``Idempotency-Key``; None: the key has no effect.
        remembers: Whether it takes an ``Idempotency-Key`` and stores its replies itself.
        dialect: The dialect of the API that the route belongs to.
        upgrades: Whether its request is the handshake of a WebSocket.
        least_output: Fewest output tokens that limits reserve for a request of this route; None: no limits hold for it.
        reads_form: Whether the handler reads the body itself: a form with files, which may be large.
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
    upgrades: bool = False
    least_output: int | None = None
    reads_form: bool = False


@dataclass(frozen=True, slots=True)
class _Pattern:
    """All routes of one path with one or two parameters."""

    prefix: str
    middle: str
    """Part of the path between two parameters; empty: there is one."""
    suffix: str
    methods: dict[str, Route]

    def parameter_in(self, path: str) -> str:
        """Returns the value of the parameter in a path, or two with a slash; empty if the path does not match."""
        if self.middle:
            first, _, second = path[len(self.prefix) :].partition(self.middle)
            is_match = path.startswith(self.prefix) and first and second and "/" not in first + second
            return f"{first}/{second}" if is_match else ""
        if not path.startswith(self.prefix) or not path.endswith(self.suffix):
            return ""
        parameter = path[len(self.prefix) : len(path) - len(self.suffix)]
        return "" if self.suffix and "/" in parameter else parameter


class RouteTable:
    """Finds the route of a request."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._exact: dict[str, dict[str, Route]] = {}
        patterns: dict[tuple[str, str, str], dict[str, Route]] = {}
        for route in self.routes:
            prefix, brace, rest = route.path.partition("{")
            middle, _, further = rest.partition("}")[2].partition("{")
            middle, suffix = (middle, "") if further else ("", middle)
            key = prefix, middle, suffix
            methods = patterns.setdefault(key, {}) if brace else self._exact.setdefault(route.path, {})
            methods[route.method] = route
        # More specific patterns are tried first.
        self._patterns = [
            _Pattern(*parts, patterns[parts])
            for parts in sorted(patterns, key=lambda parts: (-len(parts[1]), -len(parts[2]), -len(parts[0])))
        ]

    def find(self, method: str, path: str) -> tuple[Route, str]:
        """Returns the route, and the value of its path parameter, if it has one.

        Raises:
            RouteNotFound: No route has this path.
            MethodNotAllowed: Routes have this path, but with other methods.
        """
        methods, parameter = self._exact.get(path), ""
        if methods is None:
            methods, parameter = self._find_spelling(path)
        # A HEAD request is handled as GET, and its body is not sent.
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            advice = next(filter(None, map(advise, _spellings(path))), "")
            # The name of a path of another API can look like a parameter here.
            if not methods or (parameter and advice):
                advice = advice or "GET /openapi.json lists the routes."
                raise RouteNotFound(f"There is no path {path[:200]!r} here. {advice}")
            raise MethodNotAllowed(f"{path[:200]} does not take {method[:20]}; it takes {', '.join(methods)}.")
        return route, parameter

    def methods_of(self, path: str) -> list[str]:
        """Returns the methods of this path, for the ``Allow`` header of a 405."""
        methods, _ = self._find_spelling(path)
        return [*methods, "HEAD"] if "GET" in methods else list(methods)

    def _find_spelling(self, path: str) -> tuple[dict[str, Route], str]:
        """Returns the routes that a path means, and the parameter."""
        for spelling in _spellings(path):
            methods, parameter = self._exact.get(spelling), ""
            if methods is None:
                methods, parameter = self._match(spelling)
            if methods:
                return methods, parameter
        return {}, ""

    def _match(self, path: str) -> tuple[dict[str, Route], str]:
        """Returns the routes of a path with a parameter, and the parameter."""
        for pattern in self._patterns:
            if parameter := pattern.parameter_in(path):
                return pattern.methods, parameter
        return {}, ""


def _spellings(path: str) -> Iterator[str]:
    """Yields a path as it is, and then without needless slashes and with ``/v1`` once."""
    yield path
    plain = _SLASHES.sub("/", path).rstrip("/")
    yield plain if plain.startswith("/v1/") else "/v1" + plain
    if plain.startswith("/v1/v1/"):
        yield plain.removeprefix("/v1")

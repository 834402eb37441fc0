"""The table of routes: which handler answers which method and path.

Paths are matched whole, by one dictionary look-up. A path that ends in ``{name}`` takes any rest, slashes included,
because a model's name may hold them.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from maitred.api.call import Call
from maitred.core.errors import MethodNotAllowed, RouteNotFound

Handler = Callable[[Call], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """One operation, with what its description in ``/openapi.json`` needs.

    Attributes:
        path: May end in one ``{name}``.
        reads: The struct of the request body. Calls with a body are work: they count as in flight, and drain.
        returns: The struct of the answer; None when it is not made from one.
        streams: The struct of a streamed chunk.
        content_type: Of an answer that is not made from a struct.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    reads: type | None = None
    returns: type | None = None
    streams: type | None = None
    content_type: str = "application/json"


class RouteTable:
    """Finds the route of a call."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            prefix, brace, _ = route.path.partition("{")
            table = self._prefixes if brace else self._exact
            table.setdefault(prefix, {})[route.method] = route

    def find(self, method: str, path: str) -> tuple[Route, str]:
        """The route, and the rest of the path if the route takes one.

        Raises:
            RouteNotFound: No route has this path.
            MethodNotAllowed: Routes have it, with other methods.
        """
        methods = self._exact.get(path)
        parameter = ""
        if methods is None:
            for prefix, candidates in self._prefixes.items():
                if path.startswith(prefix) and len(path) > len(prefix):
                    methods, parameter = candidates, path.removeprefix(prefix)
                    break
            else:
                raise RouteNotFound(f"There is no path {path[:200]!r} here. GET /openapi.json lists the routes.")
        # HEAD is GET whose body is not sent.
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            raise MethodNotAllowed(f"{path[:200]} does not take {method[:20]}; it takes {', '.join(methods)}.")
        return route, parameter

    def methods_of(self, path: str) -> list[str]:
        """The methods that this path takes, for the ``Allow`` header of a 405."""
        methods = self._exact.get(path)
        if methods is None:
            methods = next((m for prefix, m in self._prefixes.items() if path.startswith(prefix)), {})
        return [*methods, "HEAD"] if "GET" in methods else list(methods)

"""What must hold between the settings of upstreams."""

import re
from collections.abc import Iterator, Sequence

from maitred.core.errors import ConfigInvalid
from maitred.replica.http.request_head import line_of
from maitred.replica.upstream.address import Address
from maitred.replica.upstream.config import UpstreamConfig
from maitred.replica.upstream.dialects import DIALECTS

_CREDENTIAL_HEADERS = frozenset({"authorization", "api-key", "x-api-key", "proxy-authorization", "cookie"})
_OURS = frozenset({"content-length", "content-type", "transfer-encoding", "host", "connection", "accept-encoding"})
_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
"""Of a header: a token (RFC 9110, section 5.6.2)."""


def upstream_faults(upstreams: Sequence[UpstreamConfig], place: str) -> Iterator[tuple[str, str]]:
    """The key to point at, and what is wrong.

    Args:
        upstreams: Of one model.
        place: The dotted name of their list.
    """
    if not upstreams:
        yield place, "Must name at least one server."
    names: set[str] = set()
    for index, upstream in enumerate(upstreams):
        here = f"{place}[{index}]"
        try:
            address = Address(upstream.url)
        except ConfigInvalid as error:
            yield f"{here}.url", str(error)
            continue
        name = upstream.name or address.host_and_port
        if name in names:
            yield f"{here}.name", f"Another upstream of this model is called {name!r}. Give this one a name of its own."
        names.add(name)
        if upstream.api_key is not None and not address.safe:
            yield (
                f"{here}.url",
                "An API key would go over the network in the open. Use https, or an address of this machine.",
            )
        for header, value in upstream.headers.items():
            if header.lower() in _CREDENTIAL_HEADERS:
                yield f"{here}.headers", f"{header} holds a credential. Give it as `api_key`, by reference."
            elif header.lower() in _OURS:
                yield f"{here}.headers", f"{header} is set by the connection itself. Remove it."
            elif not _NAME.fullmatch(header):
                yield f"{here}.headers", f"{header!r} is no name of a header. Use letters, digits and hyphens."
            else:
                try:
                    line_of(header, value)
                except ValueError as error:
                    yield f"{here}.headers", str(error)


def continuation_faults(upstreams: Sequence[UpstreamConfig], place: str) -> Iterator[tuple[str, str]]:
    """The servers of a model with `continuation: reprompt` that cannot go on with what another one has begun.

    Args:
        upstreams: Of the model.
        place: The dotted name of their list.
    """
    able = [name for name, dialect in DIALECTS.items() if dialect.continuing is not None]
    for index, upstream in enumerate(upstreams):
        if upstream.kind != "openai" or upstream.dialect not in able:
            yield (
                f"{place}[{index}].dialect",
                "This server is not known to go on with an answer that another one has begun, as `continuation: "
                f"reprompt` wants. Those that are: {', '.join(able)}. Set the dialect, or leave out `continuation`.",
            )

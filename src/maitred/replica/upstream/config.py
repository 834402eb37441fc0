"""Settings of the `upstreams` of a model: URL, credential, dialect and time limits of each server."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from maitred.core.errors import ConfigInvalid
from maitred.core.secret import Secret
from maitred.replica.http.request_head import encode_header
from maitred.replica.upstream.dialects import DIALECTS, GATEWAY_FIELDS, DialectName
from maitred.replica.upstream.url import UpstreamUrl
from maitred.wire.openai.fields import LIMIT_FIELDS

_SECONDS_UNIT = {"unit": "seconds"}


class UpstreamConfig(Struct, frozen=True, kw_only=True):
    """Settings of one upstream server of a model.

    If a model has several servers, each request is dispatched to one of them.
    """

    url: Annotated[
        str,
        Meta(
            min_length=1,
            description="Where its API begins, mostly with `/v1` at the end: `https://api.openai.com/v1`, "
            "`http://10.0.0.7:8000/v1`. Addresses of this machine or of a private network are used because they stand "
            "here; redirects are never followed.",
        ),
    ]
    name: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        Meta(description="What the ledger and the log call it; null takes host and port of the URL."),
    ] = None
    kind: Annotated[
        Literal["openai", "anthropic"],
        Meta(description="The API that it speaks: OpenAI's chat completions, or Anthropic's Messages."),
    ] = "openai"
    responses: Annotated[
        bool | None,
        Meta(
            description="Whether it speaks OpenAI's Responses API beside chat completions, at `responses` below its "
            "URL. Requests of `POST /v1/responses` then reach it as they were written; else they are asked of it as "
            "chat completions. Null: only of the dialect `openai` at OpenAI's own address. Of the kind `openai` only. "
            "See [upstreams](upstreams.md#servers-that-speak-the-responses-api)."
        ),
    ] = None
    dialect: Annotated[
        DialectName,
        Meta(
            description="Which server it is: where it tells of its health, which fields it takes beyond OpenAI's, how "
            "its refusals look. Of the kind `openai` only. See [upstreams](upstreams.md)."
        ),
    ] = "generic"
    model: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        Meta(description="What the server calls the model; null: the same as here."),
    ] = None
    api_key: Annotated[Secret | None, Meta(description="What it wants to see of us; null sends nothing.")] = None
    ca_file: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Certificates (PEM) of who may have signed the server's; null: those that this system trusts. "
            "A certificate that does not verify ends the connection: there is no setting against it."
        ),
    ] = None
    headers: Annotated[
        dict[str, str],
        Meta(description="Sent with every request, such as `OpenAI-Organization`. No place for credentials."),
    ] = {}
    parameters: Annotated[
        dict[str, Any],
        Meta(
            description="Fields that are put into the body of every request that does not have them, such as "
            "`chat_template_kwargs: {enable_thinking: false}`."
        ),
    ] = {}
    request_fields: Annotated[
        list[str],
        Meta(
            description="Fields of requests that this server has beyond those of its dialect, such as `provider` of "
            "OpenRouter; clients may send them. See [request fields](request-fields.md)."
        ),
    ] = []
    continues_answers: Annotated[
        bool,
        Meta(
            description="Whether it goes on with a last message of the assistant, and so with an answer that another "
            "server has begun: see `continuation`. `vllm`, `sglang` and `llamacpp` do so in any case. A server that "
            "answers such a message anew would repeat the text."
        ),
    ] = False
    connect_timeout_s: Annotated[
        float, Meta(gt=0, le=600, description="To connect, with the TLS handshake.", extra=_SECONDS_UNIT)
    ] = 5.0
    first_part_timeout_s: Annotated[
        Annotated[float, Meta(gt=0, le=86_400)] | None,
        Meta(
            description="From the request to the first part of the answer. A server that queues may need longer than "
            "one that does not; signs of life that are no answer do not count. Null: 30 s while another server or "
            "another model of the request's route can be asked instead, else 120 s.",
            extra=_SECONDS_UNIT,
        ),
    ] = None
    idle_timeout_s: Annotated[
        float, Meta(gt=0, le=86_400, description="Between two pieces of an answer that has begun.", extra=_SECONDS_UNIT)
    ] = 60.0
    total_timeout_s: Annotated[
        float, Meta(gt=0, le=86_400, description="From the request to the end of the answer.", extra=_SECONDS_UNIT)
    ] = 1800.0
    max_answer_bytes: Annotated[
        int,
        Meta(
            ge=1 << 16,
            description="Most bytes of an answer with all that is around its text; a longer one is broken off.",
            extra={"unit": "bytes"},
        ),
    ] = 128 << 20
    probe_every_s: Annotated[
        float, Meta(gt=0, le=3600, description="Between two looks whether it is there.", extra=_SECONDS_UNIT)
    ] = 5.0
    probe_timeout_s: Annotated[
        float, Meta(gt=0, le=600, description="For one of these looks.", extra=_SECONDS_UNIT)
    ] = 5.0


_CREDENTIAL_HEADERS = frozenset({"authorization", "api-key", "x-api-key", "proxy-authorization", "cookie"})
_RESERVED_HEADERS = frozenset(
    {"content-length", "content-type", "transfer-encoding", "host", "connection", "accept-encoding"}
)
_HEADER_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
"""Pattern of a header's name: a token (RFC 9110, section 5.6.2)."""


def upstream_faults(upstreams: Sequence[UpstreamConfig], location: str) -> Iterator[tuple[str, str]]:
    """Yields the name of the setting and a message for each error in the settings.

    Args:
        upstreams: The servers of one model.
        location: Dotted name of the list in the configuration, for the messages.
    """
    if not upstreams:
        yield location, "Must name at least one server."
    names: set[str] = set()
    for index, upstream in enumerate(upstreams):
        setting = f"{location}[{index}]"
        try:
            parsed_url = UpstreamUrl(upstream.url)
        except ConfigInvalid as error:
            yield f"{setting}.url", str(error)
            continue
        name = upstream.name or parsed_url.host_and_port
        if name in names:
            yield (
                f"{setting}.name",
                f"Another upstream of this model is called {name!r}. Give this one a name of its own.",
            )
        names.add(name)
        if upstream.api_key is not None and not parsed_url.is_confidential:
            yield (
                f"{setting}.url",
                "An API key would go over the network in the open. Use https, or an address of this machine.",
            )
        if upstream.responses and upstream.kind != "openai":
            yield f"{setting}.responses", "Only servers of the kind `openai` speak the Responses API. Remove it."
        for field in upstream.request_fields:
            if field in LIMIT_FIELDS or field in GATEWAY_FIELDS:
                yield f"{setting}.request_fields", f"{field} is what limits grant, or is set by the gateway. Remove it."
        for header, value in upstream.headers.items():
            if header.lower() in _CREDENTIAL_HEADERS:
                yield f"{setting}.headers", f"{header} holds a credential. Give it as `api_key`, by reference."
            elif header.lower() in _RESERVED_HEADERS:
                yield f"{setting}.headers", f"{header} is set by the connection itself. Remove it."
            elif not _HEADER_NAME.fullmatch(header):
                yield f"{setting}.headers", f"{header!r} is no name of a header. Use letters, digits and hyphens."
            else:
                try:
                    encode_header(header, value)
                except ValueError as error:
                    yield f"{setting}.headers", str(error)


def continuation_faults(upstreams: Sequence[UpstreamConfig], location: str) -> Iterator[tuple[str, str]]:
    """Yields an error for each server that cannot continue another server's response.

    Args:
        upstreams: The servers of the model.
        location: The dotted name of their list.
    """
    dialects = [name for name, dialect in DIALECTS.items() if dialect.continuation_fields is not None]
    for index, upstream in enumerate(upstreams):
        if not upstream.continues_answers and (upstream.kind != "openai" or upstream.dialect not in dialects):
            yield (
                f"{location}[{index}].dialect",
                "This server is not known to go on with an answer that another one has begun, as `continuation: "
                f"reprompt` wants. Those that are: {', '.join(dialects)}. "
                "Set the dialect, or `continues_answers` if it does, or leave out `continuation`.",
            )

"""The `upstreams` of a model: servers that others run, and how they are spoken to."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from maitred.core.secret import Secret

DialectName = Literal[
    "generic",
    "vllm",
    "sglang",
    "tgi",
    "trtllm",
    "llamacpp",
    "transformers",
    "ollama",
    "litellm",
    "openai",
    "azure",
    "groq",
    "together",
]

_TIMEOUT = {"unit": "seconds"}


class UpstreamConfig(Struct, frozen=True, kw_only=True):
    """One server that answers requests of the model. Of several, each request goes to one that has room."""

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
    connect_timeout_s: Annotated[
        float, Meta(gt=0, le=600, description="To connect, with the TLS handshake.", extra=_TIMEOUT)
    ] = 5.0
    first_part_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="From the request to the first part of the answer. A server that queues may need longer than "
            "one that does not; signs of life that are no answer do not count.",
            extra=_TIMEOUT,
        ),
    ] = 120.0
    idle_timeout_s: Annotated[
        float, Meta(gt=0, le=86_400, description="Between two pieces of an answer that has begun.", extra=_TIMEOUT)
    ] = 60.0
    total_timeout_s: Annotated[
        float, Meta(gt=0, le=86_400, description="From the request to the end of the answer.", extra=_TIMEOUT)
    ] = 1800.0
    probe_every_s: Annotated[
        float, Meta(gt=0, le=3600, description="Between two looks whether it is there.", extra=_TIMEOUT)
    ] = 5.0
    probe_timeout_s: Annotated[float, Meta(gt=0, le=600, description="For one of these looks.", extra=_TIMEOUT)] = 5.0

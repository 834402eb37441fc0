"""Settings of the sections `log`, `metrics`, `slos`, `explain` and `traces`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from maitred.core.secret import Secret
from maitred.wire.loopback import is_loopback


class LogConfig(Struct, frozen=True, kw_only=True):
    """Logging: which messages are written, and in which format."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least severe message that is written."),
    ] = "info"
    format: Annotated[
        Literal["text", "json"],
        Meta(description="`text` for people, `json` (one object per line) for a log collector."),
    ] = "text"
    burst: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="How many messages of one kind are written in a second. Of more, the number is written instead "
            "of them. 0: all are written.",
            extra={"unit": "messages per second"},
        ),
    ] = 20


class MetricsConfig(Struct, frozen=True, kw_only=True):
    """Contents of `GET /metrics`."""

    vllm_names: Annotated[
        bool,
        Meta(
            description="Show what engines and requests do under vLLM's names, too, such as"
            " `vllm:num_requests_waiting`, for dashboards and autoscalers that were made for it."
        ),
    ] = True
    tenants: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="How many organisations have series of their own: those that come first since the start. The "
            "others are counted together, as `other`.",
            extra={"unit": "organisations"},
        ),
    ] = 100


class SloConfig(Struct, frozen=True, kw_only=True):
    """Service level objective of a model and a class: the share of its requests that must meet it."""

    indicator: Annotated[
        Literal["availability", "ttft", "itl"],
        Meta(
            description="What goes well. `availability`: a request is answered, not refused for lack of capacity and "
            "not failed. `ttft`: its first token comes within `within_s`. `itl`: so does each next delivery of tokens."
        ),
    ]
    objective: Annotated[
        float,
        Meta(gt=0, lt=1, description="The share that is to go well, such as 0.99 for all but one in a hundred."),
    ]
    within_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="The longest time that is well. Needed by `ttft` and `itl`; `availability` has none.",
            extra={"unit": "seconds"},
        ),
    ] = None
    model: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="The model whose requests count; null: of all models."),
    ] = None
    priority: Annotated[
        Literal["interactive", "standard", "batch", "background"] | None,
        Meta(description="The class whose requests count; null: of all classes."),
    ] = None
    window_days: Annotated[
        int, Meta(ge=1, le=90, description="The time over which the error budget is reckoned.", extra={"unit": "days"})
    ] = 30


def slo_faults(slos: Mapping[str, SloConfig]) -> Iterator[tuple[str, str]]:
    """Yields settings of objectives that contradict each other, each with the reason."""
    for name, slo in slos.items():
        if slo.indicator == "availability" and slo.within_s is not None:
            yield (
                f"slos.{name}.within_s",
                "Availability knows no time. Leave it out, or take the indicator ttft or itl.",
            )
        elif slo.indicator != "availability" and slo.within_s is None:
            yield (
                f"slos.{name}.indicator",
                f"The indicator {slo.indicator} needs within_s, the longest time that is well.",
            )


class TracesConfig(Struct, frozen=True, kw_only=True):
    """Traces of requests, sent by OpenTelemetry's protocol. Needs ``pip install 'maitred[otel]'``."""

    endpoint: Annotated[
        Annotated[str, Meta(pattern="^https?://")] | None,
        Meta(
            description="Where spans are sent, by OTLP over HTTP in protobuf: the whole URL, such as "
            "`http://localhost:4318/v1/traces`. Null: nothing is traced, and it costs nothing. See [traces](traces.md)."
        ),
    ] = None
    headers: Annotated[
        dict[str, Secret],
        Meta(description="Sent with them, each by reference, such as `Authorization: {env: LANGFUSE_AUTHORIZATION}`."),
    ] = {}
    ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of the requests that are traced, of those whose clients have not decided that.",
        ),
    ] = 1.0
    failures: Annotated[
        bool,
        Meta(
            description="Send our spans of requests that failed, too, where they were not to be traced and their "
            "clients have not decided that. Servers behind us have not kept theirs."
        ),
    ] = True
    follow: Annotated[
        bool,
        Meta(
            description="Go on with the traces that clients send in `traceparent`, and trace what they decided to "
            "trace. For an open service, false ignores what clients ask for: every trace begins here."
        ),
    ] = True
    content: Annotated[
        bool,
        Meta(
            description="Put prompts and answers into the spans of sampled requests. Whoever reads the traces then "
            "reads them."
        ),
    ] = False
    service_name: Annotated[
        str, Meta(min_length=1, max_length=200, description="What traces call this gateway; engines are `NAME-engine`.")
    ] = "maitred"


def trace_faults(traces: TracesConfig) -> Iterator[tuple[str, str]]:
    """Yields settings of traces that would leak secrets, each with the reason."""
    if traces.endpoint is None:
        return
    host = urlsplit(traces.endpoint).hostname or ""
    if (traces.headers or traces.content) and traces.endpoint.startswith("http:") and not is_loopback(host):
        exposed = "Prompts and answers" if traces.content else "A credential"
        yield (
            "traces.endpoint",
            f"{exposed} would go over the network in the open. Use https, or an address of this machine.",
        )


class ExplainConfig(Struct, frozen=True, kw_only=True):
    """Memory of ended requests for `maitred explain`."""

    requests: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="Of how many of the last requests a gateway remembers what happened to them: times, waits, "
            "decisions and counts, never a prompt or an answer. In memory, some kilobytes each.",
            extra={"unit": "requests"},
        ),
    ] = 1000

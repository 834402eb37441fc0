"""The `log` and `metrics` sections: what is logged and shown, and in which shape."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class LogConfig(Struct, frozen=True, kw_only=True):
    """What is logged, and in which shape."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least severe message that is written."),
    ] = "info"
    format: Annotated[
        Literal["text", "json"],
        Meta(description="`text` for people, `json` (one object per line) for a log collector."),
    ] = "text"


class MetricsConfig(Struct, frozen=True, kw_only=True):
    """What `GET /metrics` shows."""

    vllm_names: Annotated[
        bool,
        Meta(
            description="Show what engines and requests do under vLLM's names, too, such as"
            " `vllm:num_requests_waiting`, for dashboards and autoscalers that were made for it."
        ),
    ] = True

"""The `log` section: what is logged, and in which shape."""

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

"""Settings of the section `console`: whether there is a web console, and how long a login lasts."""

from typing import Annotated

from msgspec import Meta, Struct


class ConsoleConfig(Struct, frozen=True, kw_only=True):
    """Web console at `/console`; see [console](console.md)."""

    enabled: Annotated[bool, Meta(description="Whether there is one.")] = True
    session_s: Annotated[
        float,
        Meta(
            ge=60,
            le=30 * 86_400,
            description="How long one stays logged in. A key that is revoked or expires ends its sessions at once.",
            extra={"unit": "seconds"},
        ),
    ] = 43_200.0
    sessions: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="Sessions at one time; one more ends the oldest of the organisation that has most, and one of "
            "an operator only if all are. They are kept in memory, and gone after a restart.",
            extra={"unit": "sessions"},
        ),
    ] = 1000
    viewers: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="Who may watch the live state at one time, in browsers and with `maitred top`; more are "
            "refused with 429. An eighth is kept for operators; of the rest, one key may take half.",
            extra={"unit": "viewers"},
        ),
    ] = 64

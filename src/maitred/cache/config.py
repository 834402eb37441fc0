"""Settings of `idempotency`: the time and the size for which answers to repeatable requests are kept."""

from typing import Annotated

from msgspec import Meta, Struct


class IdempotencyConfig(Struct, frozen=True, kw_only=True):
    """Settings of stored answers: the time and the size for requests repeated with their Idempotency-Key."""

    ttl_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="How long an answer is kept after its end. A repeat that comes later runs anew.",
            extra={"unit": "seconds"},
        ),
    ] = 600.0
    max_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            le=1 << 40,
            description="Memory for all kept answers together; when it is full, the organisation that has most of it "
            "loses the one that ended first.",
            extra={"unit": "bytes"},
        ),
    ] = 256 << 20
    max_answer_bytes: Annotated[
        int,
        Meta(
            ge=1 << 10,
            le=1 << 34,
            description="Largest answer that is kept. A longer one reaches who is connected, but cannot be repeated: "
            "its Idempotency-Key is refused with 409 until `ttl_s` is over.",
            extra={"unit": "bytes"},
        ),
    ] = 8 << 20

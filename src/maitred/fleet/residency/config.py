"""Settings of `residency`: how several models share the memory of one machine."""

from typing import Annotated

from msgspec import Meta, Struct


class ResidencyConfig(Struct, frozen=True, kw_only=True):
    """Settings of the memory that models loaded on demand (`models.NAME.path`) share."""

    memory_bytes: Annotated[
        Annotated[int, Meta(ge=1 << 20)] | None,
        Meta(
            description="What these models may take together: weights, KV cache and process. The model of the section "
            "`model` and the encoder come on top. Null: 80 % of what is free when the server starts. On a GPU it is "
            "the GPU's memory that is shared, and must be said here.",
            extra={"unit": "bytes"},
        ),
    ] = None
    turn_loads: Annotated[
        float,
        Meta(
            ge=0,
            le=1000,
            description="How long a model that was loaded may stay while others are waited for, in times of what its "
            "load took. More: less time goes into loading (while all have work, at most one part in `1 + turn_loads`), "
            "and others wait longer.",
        ),
    ] = 4.0
    keep_alive_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="A model that has been idle for so long gives its memory back, even if no other model needs "
            "it. Null: it stays until another one does.",
            extra={"unit": "seconds"},
        ),
    ] = None

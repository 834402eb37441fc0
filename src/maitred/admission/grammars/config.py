"""The `admission.grammars` section: bounds on the work for callers' grammars."""

from typing import Annotated

from msgspec import Meta, Struct


class GrammarsConfig(Struct, frozen=True, kw_only=True):
    """Bounds on the work for grammars: JSON schemas, regular expressions, choices and EBNF."""

    most_bytes: Annotated[
        int,
        Meta(ge=64, le=1 << 22, description="Longest grammar, as it is sent.", extra={"unit": "bytes"}),
    ] = 65_536
    compile_s: Annotated[
        float,
        Meta(
            gt=0,
            le=60,
            description="Processor time that a grammar may take to be compiled; then it is refused. Time in which "
            "other processes use the cores does not count.",
            extra={"unit": "seconds"},
        ),
    ] = 2.0
    workers: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Processes that compile grammars, so many at a time. They are started when the first grammar "
            "comes.",
            extra={"unit": "processes"},
        ),
    ] = 2
    per_organisation: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Of these, how many work for one organisation at a time. Fewer than `workers` leave a process "
            "to the others while one sends grammars that take long.",
            extra={"unit": "processes"},
        ),
    ] = 1
    waiting_per_organisation: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description="Grammars of one organisation that may wait to be compiled; further ones are refused with 429. "
            "Its keys share these places and take turns.",
            extra={"unit": "grammars"},
        ),
    ] = 64
    cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 32,
            description="Grammars that are remembered, so that they need not be compiled again.",
            extra={"unit": "bytes"},
        ),
    ] = 16 << 20

"""What is wrong with the `engine` section beyond single settings."""

from collections.abc import Iterator

from maitred.engine.config import EngineConfig, SpeculationConfig


def engine_faults(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """The dotted key of each fault, and the sentence for it."""
    if config.min_sequences > config.max_sequences:
        yield (
            "engine.min_sequences",
            f"{config.min_sequences} is more than engine.max_sequences, {config.max_sequences}. Lower min_sequences or "
            "raise max_sequences.",
        )
    for tenant, share in config.kv_shares.items():
        if share.floor > share.ceiling:
            yield (
                f"engine.kv_shares.{tenant}.floor",
                f"{share.floor:g} is more than the tenant's ceiling, {share.ceiling:g}: it could never have what "
                "others leave to it. Lower the floor or raise the ceiling.",
            )
    floors = sum(share.floor for share in config.kv_shares.values())
    if floors > 1 + 1e-9:
        yield (
            "engine.kv_shares",
            f"The floors add up to {floors:g} of the KV cache, and there is only one. Lower some of them until they "
            "add up to at most 1.",
        )
    yield from speculation_faults(config.speculation)


def speculation_faults(speculation: SpeculationConfig) -> Iterator[tuple[str, str]]:
    """The same of its section `speculation`."""
    written = speculation.method in ("draft_model", "auto")
    if written and speculation.draft_model is None:
        yield (
            "engine.speculation.method",
            f"It is {speculation.method}, but no draft model is named. Set engine.speculation.draft_model to the "
            "folder of a smaller model with the same vocabulary, or the method to ngram.",
        )
    if not written and speculation.draft_model is not None:
        yield (
            "engine.speculation.draft_model",
            f"It is set, but engine.speculation.method is {speculation.method}, which does not use it. Set the method "
            "to draft_model or auto, or draft_model to null.",
        )

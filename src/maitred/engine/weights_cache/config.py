"""Settings of the `engine.weights_cache` section. The module imports nothing heavy: gateways read them too."""

from typing import Annotated

from msgspec import Meta, Struct


class WeightsCacheConfig(Struct, frozen=True, kw_only=True):
    """Settings of the cache on disk for weights as a CPU computes with them.

    An engine that finds its model there maps the file instead of converting the checkpoint: it starts in seconds, and
    all engines of one machine that run the model share its memory.
    """

    enabled: Annotated[
        bool,
        Meta(description="Keep them. Without, every engine converts the checkpoint for itself, in memory of its own."),
    ] = True
    folder: Annotated[
        str,
        Meta(
            description="Where they are kept; a local disk, please. Empty: `$XDG_CACHE_HOME/maitred/weights`, or "
            "`~/.cache/maitred/weights`."
        ),
    ] = ""
    most_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="Disk that all of them take together. Those that were not used for longest are thrown away "
            "first; a model that is larger is not kept.",
            extra={"unit": "bytes"},
        ),
    ] = 64 << 30

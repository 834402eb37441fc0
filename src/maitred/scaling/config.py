"""Settings of `model.autoscaling`: objectives and limits of the number of replicas."""

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct

from maitred.scaling.objectives import ScalingObjectives

_MOST_REPLICAS = 64


class AutoscalingConfig(Struct, frozen=True, kw_only=True):
    """Objectives and limits by which the number of a model's replicas follows the demand.

    See [scaling](scaling.md).
    """

    enabled: Annotated[
        bool,
        Meta(
            description="Whether the number of replicas follows the demand. `model.replicas` is then the number at the "
            "start. See [scaling](scaling.md)."
        ),
    ] = False
    min_replicas: Annotated[
        int,
        Meta(
            ge=0,
            le=_MOST_REPLICAS,
            description="Fewest replicas that serve. 0: a model that nobody asks has none, and its next request waits "
            "for a start.",
            extra={"unit": "replicas"},
        ),
    ] = 1
    max_replicas: Annotated[
        int,
        Meta(
            ge=1,
            le=_MOST_REPLICAS,
            description="Most replicas that serve or are about to. Each gets its part of this machine, as if so many "
            "were running as the gateway was started with: a reload changes their number, and a restart the parts.",
            extra={"unit": "replicas"},
        ),
    ] = 1
    ttft_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Objective of the time to first token, its wait included: there are as many replicas as 95 % "
            "of the requests need to meet it.",
            extra={"unit": "seconds"},
        ),
    ] = 2.0
    itl_s: Annotated[
        float,
        Meta(gt=0, description="Objective of the mean time between two tokens.", extra={"unit": "seconds"}),
    ] = 0.1
    target_utilisation: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Highest part of what the replicas serve within the objectives that the forecast may need; the "
            "rest is for what no forecast knows.",
        ),
    ] = 0.95
    confidence: Annotated[
        float,
        Meta(
            ge=0.5,
            lt=1,
            description="Quantile of the forecast for which the objectives must hold. More: fewer misses, and more "
            "replicas.",
        ),
    ] = 0.9
    sleeping_replicas: Annotated[
        int,
        Meta(
            ge=0,
            le=_MOST_REPLICAS,
            description="Replicas that are kept asleep beside those that serve, because waking one is quicker than a "
            "start. They count in `max_gpus` and `max_usd_per_hour`, and not in `max_replicas`.",
            extra={"unit": "replicas"},
        ),
    ] = 0
    gpus_per_replica: Annotated[
        float,
        Meta(
            ge=0,
            description="GPUs of one replica. 0: as many as the backend says (`ray.replica.num_gpus`).",
            extra={"unit": "GPUs"},
        ),
    ] = 0.0
    max_gpus: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Most GPUs that all replicas together may have, even if `min_replicas` have more. Null: no "
            "such limit.",
            extra={"unit": "GPUs"},
        ),
    ] = None
    usd_per_hour: Annotated[
        float,
        Meta(
            ge=0,
            description="Price of one replica. 0: unknown, and then only `max_replicas` bounds their number.",
            extra={"unit": "USD"},
        ),
    ] = 0.0
    max_usd_per_hour: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Most that all replicas together may cost, even if `min_replicas` cost more. Null: no such "
            "limit.",
            extra={"unit": "USD"},
        ),
    ] = None
    warm_up_s: Annotated[
        float,
        Meta(
            ge=0,
            description="For so long after its start, the step times of a replica do not count for what a replica can "
            "do: the first steps are slow.",
            extra={"unit": "seconds"},
        ),
    ] = 30.0

    @property
    def objectives(self) -> ScalingObjectives:
        """The objectives and limits for decisions."""
        return ScalingObjectives(
            ttft_s=self.ttft_s,
            itl_s=self.itl_s,
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            gpus_per_replica=self.gpus_per_replica,
            max_gpus=self.max_gpus,
            usd_per_hour=self.usd_per_hour,
            max_usd_per_hour=self.max_usd_per_hour,
            target_utilisation=self.target_utilisation,
            confidence=self.confidence,
            sleeping_replicas=self.sleeping_replicas,
        )


def autoscaling_faults(
    config: AutoscalingConfig, replicas: int, gpus_per_replica: float, *, is_attached: bool
) -> Iterator[tuple[str, str]]:
    """Yields the settings of `model.autoscaling` that do not fit together, each with the reason.

    Args:
        config: The settings.
        replicas: `model.replicas`.
        gpus_per_replica: GPUs of one replica as the backend says; 0: it does not say.
        is_attached: Whether the engines of the model are named, so that others start and stop them.
    """
    if not config.enabled:
        return
    key = "model.autoscaling"
    if is_attached:
        yield (
            f"{key}.enabled",
            "Engines that are named in model.engines are started by others, so their number cannot be changed here. "
            "Leave out one of the two.",
        )
    if config.min_replicas > config.max_replicas:
        yield f"{key}.min_replicas", f"{config.min_replicas} is more than max_replicas, {config.max_replicas}."
    if replicas > config.max_replicas:
        yield f"{key}.max_replicas", f"{config.max_replicas} is less than model.replicas, {replicas}, of the start."
    if config.max_usd_per_hour is not None and config.usd_per_hour == 0:
        yield f"{key}.max_usd_per_hour", "It needs usd_per_hour, the price of one replica."
    if config.max_gpus is not None and not (config.gpus_per_replica or gpus_per_replica):
        yield f"{key}.max_gpus", "It needs gpus_per_replica, the GPUs of one replica."

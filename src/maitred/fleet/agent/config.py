"""Settings of `agents`: how a gateway takes in the agents that own the engines of its model on other machines."""

from typing import Annotated

from msgspec import Meta, Struct


class AgentConfig(Struct, frozen=True, kw_only=True):
    """Settings of the agents that own the engines of the section `model` if `model.backend` is `agents`."""

    listen: Annotated[
        str,
        Meta(
            pattern="^tcp:",
            description="Where agents (`maitred agent --gateway HOST:PORT`) connect, as `tcp:host:port`. Both ends "
            "know each other by the section `engine_link`, as gateways and engines do.",
        ),
    ] = "tcp:127.0.0.1:9300"
    lost_after_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="An agent that is away for so long, with engines that do not answer either, is given up: its "
            "replicas are started on other machines.",
            extra={"unit": "seconds"},
        ),
    ] = 10.0

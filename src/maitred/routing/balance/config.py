"""Settings of `routing.balance`: how requests are distributed among several replicas."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

PolicyName = Literal["predicted_ttft", "round_robin", "least_requests", "least_tokens", "power_of_two", "weighted"]


class BalanceConfig(Struct, frozen=True, kw_only=True):
    """Settings of load balancing: how requests are distributed among several replicas of a model."""

    policy: Annotated[
        PolicyName,
        Meta(
            description="`predicted_ttft`: the earliest first token, counting what each replica holds of the prompt. "
            "`least_tokens`: the fewest outstanding tokens. `least_requests`: the fewest outstanding requests. "
            "`power_of_two`: of two drawn ones, the one with fewer outstanding tokens. `round_robin`: in turn. "
            "`weighted`: in turn, by weight."
        ),
    ] = "predicted_ttft"
    recompute_price: Annotated[
        float,
        Meta(
            ge=1,
            description="What a second of computing a prompt counts for `predicted_ttft` beside a second of waiting. "
            "What a replica computes that another one holds delays those who come after. With 1 everybody goes where "
            "its own first token comes first; the greater, the longer it waits for a replica that holds its prefix.",
        ),
    ] = 4.0
    bound: Annotated[
        Annotated[float, Meta(gt=1)] | None,
        Meta(
            description="No replica is given more than this many times its share of the load, whatever the policy or "
            "the session says, while it is busy and another can take the request. Load is what a replica was given "
            "lately, or has to do still, whichever is more. Null: there is no bound."
        ),
    ] = 1.2
    affinity: Annotated[
        bool,
        Meta(
            description="Whether requests of one session (`x-session-id`, `prompt_cache_key`) go to one replica, as "
            "far as the bound allows."
        ),
    ] = True

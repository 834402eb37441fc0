"""Settings of replica health: circuit breaker, outlier detection and slow start."""

from typing import Annotated

from msgspec import Meta, Struct

_Seconds = Annotated[float, Meta(gt=0, extra={"unit": "seconds"})]


class BreakerConfig(Struct, frozen=True, kw_only=True):
    """Settings of the circuit breaker: when failures stop the requests to a replica, and for how long."""

    max_fails: Annotated[int, Meta(ge=1, description="Requests or probes that fail in a row until it is opened.")] = 5
    error_rate: Annotated[
        float,
        Meta(gt=0, le=1, description="It is also opened when this part of the requests in `window_s` has failed."),
    ] = 0.5
    least_requests: Annotated[
        int, Meta(ge=1, description="With fewer than so many in `window_s`, `error_rate` says nothing.")
    ] = 20
    window_s: Annotated[_Seconds, Meta(description="How far back failures and times are looked at.")] = 30.0
    first_open_s: Annotated[
        _Seconds,
        Meta(description="Longest time that it stays open at first. It doubles each time that it is opened again."),
    ] = 1.0
    most_open_s: Annotated[_Seconds, Meta(description="Where that time stops growing.")] = 60.0


class OutlierConfig(Struct, frozen=True, kw_only=True):
    """Settings of outlier detection: when a replica is ejected because it is worse than its peers."""

    share: Annotated[
        float, Meta(ge=0, lt=1, description="Part of a pool's replicas that may be left out at a time; 0: none is.")
    ] = 0.34
    every_s: Annotated[_Seconds, Meta(description="How often they are compared.")] = 10.0
    least_requests: Annotated[
        int, Meta(ge=1, description="A replica with fewer requests in the breaker's window is not compared.")
    ] = 20
    latency_factor: Annotated[
        float, Meta(gt=1, description="It is left out when its times to first token are this many times the others'.")
    ] = 3.0
    error_margin: Annotated[
        float,
        Meta(gt=0, lt=1, description="It is left out when a part of its requests fails that is so much larger."),
    ] = 0.2
    base_s: Annotated[
        _Seconds, Meta(description="For how long, the first time; twice as long the second time, and so on.")
    ] = 30.0
    most_s: Annotated[_Seconds, Meta(description="For how long at most.")] = 300.0


class HealthConfig(Struct, frozen=True, kw_only=True):
    """Settings of replica health: circuit breaker, outlier detection and slow start."""

    breaker: BreakerConfig = BreakerConfig()
    outliers: OutlierConfig = OutlierConfig()
    most_refusals: Annotated[
        int,
        Meta(
            ge=1,
            description="After so many refusals for want of room (429, 503) in a row, requests begin at the `general` "
            "fallback of their model, if it has one, for the time that a breaker would be open.",
        ),
    ] = 3
    slow_start_s: Annotated[
        float,
        Meta(
            ge=0,
            description="For how long the weight of a replica that comes back rises to its whole; 0: it is there at "
            "once.",
            extra={"unit": "seconds"},
        ),
    ] = 30.0
    slow_start_least: Annotated[float, Meta(gt=0, le=1, description="The part of its weight that it begins with.")] = (
        0.1
    )

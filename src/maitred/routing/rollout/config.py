"""Settings of `routing.rollouts`: names for which a new version of a model is tried."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from maitred.routing.rollout.trial import TrialRules, TrialTolerance

_PromoteMeta = Meta(ge=0, le=1, description="So much is no reason against a promotion; above that for an abort.")


class TrialConfig(Struct, frozen=True, kw_only=True):
    """Settings of a canary's trial: the requirements on the canary, compared with the stable version."""

    false_alarms: Annotated[
        float, Meta(gt=0, lt=1, description="How often a canary that is no different may be aborted.")
    ] = 0.05
    bad_promotions: Annotated[
        float, Meta(gt=0, lt=1, description="How often one that is worse than allowed may be promoted.")
    ] = 0.05
    baseline_requests: Annotated[
        int,
        Meta(ge=20, description="Requests of the stable version from which its 95th percentiles are taken."),
    ] = 200
    least_requests: Annotated[int, Meta(ge=1, description="Requests of the canary before it can be promoted.")] = 100
    slow_abort: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="More than so much of its requests, beyond 5 %, above the stable version's 95th percentile is "
            "a reason to abort; of the time to the first token, and of that between tokens.",
        ),
    ] = 0.01
    slow_promote: Annotated[float, _PromoteMeta] = 0.06
    failed_abort: Annotated[
        float, Meta(ge=0, le=1, description="The same of the share of requests that fail, beyond the stable version's.")
    ] = 0.0
    failed_promote: Annotated[float, _PromoteMeta] = 0.02
    refused_abort: Annotated[float, Meta(ge=0, le=1, description="The same of requests that are refused.")] = 0.0
    refused_promote: Annotated[float, _PromoteMeta] = 0.03
    disagreeing_abort: Annotated[
        float, Meta(ge=0, le=1, description="The same of copied requests whose two answers do not agree, beyond none.")
    ] = 0.05
    disagreeing_promote: Annotated[float, _PromoteMeta] = 0.12
    length_abort: Annotated[
        float,
        Meta(gt=0, description="The same of the mean logarithm of tokens per answer: 0.1 is a tenth more, or less."),
    ] = 0.1
    length_promote: Annotated[float, Meta(gt=0, description=_PromoteMeta.description)] = 0.3
    similarity: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="How much of their words two answers of more than 32 words must have in common to agree (F1); "
            "shorter ones must be the same.",
        ),
    ] = 0.8
    sampled_similarity: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(
            description="The same of answers that were sampled, whatever their length. Null: only those of greedy "
            "requests (`temperature: 0`) are compared."
        ),
    ] = None
    patience_s: Annotated[
        float,
        Meta(
            gt=0,
            description="The trial takes requests in the order in which they began. It waits for the end of one for so "
            "long; then what is seen of it by then counts.",
            extra={"unit": "seconds"},
        ),
    ] = 30.0

    def make_rules(self, *, compares: bool) -> TrialRules:
        """Makes the rules of a trial that compares answers, or of one that does not."""
        return TrialRules(
            false_alarms=self.false_alarms,
            bad_promotions=self.bad_promotions,
            baseline_requests=self.baseline_requests,
            least_requests=self.least_requests,
            slow=TrialTolerance(self.slow_abort, self.slow_promote),
            failed=TrialTolerance(self.failed_abort, self.failed_promote),
            refused=TrialTolerance(self.refused_abort, self.refused_promote),
            disagreeing=TrialTolerance(self.disagreeing_abort, self.disagreeing_promote) if compares else None,
            length=TrialTolerance(self.length_abort, self.length_promote),
        )


class RolloutConfig(Struct, frozen=True, kw_only=True):
    """Settings of a rollout: two models with one name, one of which is on trial."""

    stable: Annotated[str, Meta(description="The model that serves so far. It may have the very name of the rollout.")]
    canary: Annotated[str, Meta(description="The model that is to take its place.")]
    weight: Annotated[float, Meta(ge=0, le=1, description="Share of the keys that the canary serves.")] = 0.0
    shadow: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of the stable version's requests that the canary answers as well, for nobody to see, "
            "so that the two answers can be compared.",
        ),
    ] = 0.0
    shadow_limit: Annotated[
        int, Meta(ge=1, description="Copies under way at one time; what comes beyond them is not copied.")
    ] = 8
    regions: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            description="Regions whose gateways take part (`region` of a gateway); in all others the stable model "
            "serves. Empty: everywhere."
        ),
    ] = ()
    sticky: Annotated[
        Literal["key", "session", "request"],
        Meta(
            description="What stays at one version: all requests of a caller's key; those of a session (header "
            "`x-session-id`, `prompt_cache_key` or `user`; of the key, where none is named); or nothing, and each "
            "request is drawn by itself."
        ),
    ] = "key"
    automatic: Annotated[
        Literal["none", "abort", "promote"],
        Meta(
            description="What the trial may do by itself: nothing, abort the canary when it is shown to be worse, or "
            "also promote it when it is shown not to be."
        ),
    ] = "abort"
    trial: TrialConfig = TrialConfig()

    def to_json(self) -> dict[str, object]:
        """Returns the settings as JSON types, for the store."""
        plain: dict[str, object] = msgspec.json.decode(msgspec.json.encode(self))
        return plain


Rollouts = Annotated[
    dict[str, RolloutConfig],
    Meta(
        description="A name that requests use -> the two models behind it, one of which is tried ([rollouts]"
        "(rollouts.md)). It begins when it appears here or is changed here; what was decided since then outlives "
        "restarts."
    ),
]

"""Explanation of a scaling decision: its reason as a sentence, with the numbers that it follows from."""

import math

from maitred.scaling.decision import ScalingDecision, ScalingLimit, ScalingReason

_LIMITS = {
    ScalingLimit.MAX_REPLICAS: "max_replicas allows no more",
    ScalingLimit.GPUS: "max_gpus allows no more",
    ScalingLimit.USD_PER_HOUR: "max_usd_per_hour allows no more",
}


def explain_decision(decision: ScalingDecision) -> str:
    """Returns the reason of a decision as a sentence."""
    evidence = decision.evidence
    objectives = evidence.objectives
    forecast = evidence.requests_per_s
    coming = f"{forecast.mean:.2g} requests/s are forecast ({forecast.low:.2g} to {forecast.high:.2g})"
    less = (
        f"with one less the first token would take {_seconds(evidence.ttft_with_one_less_s)} of {objectives.ttft_s:g} s"
    )
    match decision.reason:
        case ScalingReason.STEADY:
            text = f"This number meets the objectives: {coming}"
            text += f", and {less}" if decision.desired > 1 and evidence.ttft_with_one_less_s is not None else ""
        case ScalingReason.BACKLOG:
            text = f"{_count(evidence.waiting, 'request')} wait, and {less}"
        case ScalingReason.FORECAST:
            text = f"{coming} in {evidence.lead_time_s:.3g} s, when another replica would serve, and {less}"
        case ScalingReason.UTILISATION:
            text = f"{coming}, and one less would be busier than {objectives.target_utilisation:.0%}"
        case ScalingReason.SURPLUS:
            text = f"{coming}, fewer replicas meet the objectives, and another start costs less than to wait longer"
        case ScalingReason.HOLDING:
            text = f"Fewer replicas would do, but the demand may return: {coming}"
        case ScalingReason.IDLE:
            text = "Nothing is asked for, and nothing is expected"
        case ScalingReason.MINIMUM:
            text = f"The demand needs fewer replicas than min_replicas, {objectives.min_replicas}: {coming}"
        case ScalingReason.LIMITED:
            text = f"The demand needs more replicas: {coming}, and the first token takes {_seconds(evidence.ttft_s)}"
        case ScalingReason.UNREACHABLE:
            text = (
                f"No number of replicas meets the objectives ({objectives.ttft_s:g} s to the first token, "
                f"{objectives.itl_s:g} s between tokens), so none are added for them"
            )
        case ScalingReason.UNKNOWN_CAPACITY:
            text = "No replica has been measured for long enough to know what it can do"
        case ScalingReason.OVERRIDE:
            text = "An operator has set this number"
    also = [words for limit, words in _LIMITS.items() if limit in evidence.limits]
    return f"{'; '.join([text, *also])}."


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "an unknown time"
    return f"{seconds:.3g} s" if math.isfinite(seconds) else "ever longer"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"

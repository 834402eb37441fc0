"""Whether a replica that is not needed is worth keeping: the price of a hold against that of a start.

Keeping it costs its time. Without it, a start is due when the demand returns: the time of the start is paid, too, and
while it lasts requests may miss their objective. How much worse a second of that is than a second of a replica too many
follows from the confidence with which the objectives must hold, as in the newsvendor problem: a quantile `q` is the
best choice if one is `q / (1 - q)` times as bad as the other.

Where nothing is known of returns, a replica is kept for as long as costs as much as a start: that is never worse than
twice the best (ski rental; R. Karp et al., 1988).
"""

from maitred.scaling.forecast import DemandForecast

_WITHIN_S = (30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0, 3_600.0)


def start_cost_s(lead_s: float, confidence: float) -> float:
    """Returns what a start costs in seconds of a replica: its own time, and misses while it lasts."""
    return lead_s / (1 - confidence)


def hold_s(forecast: DemandForecast, requests_per_s: float, *, unneeded_s: float, start_cost_s: float) -> float:
    """Returns for how many more seconds a replica should be kept; 0: a start is cheaper.

    Args:
        forecast: Forecast, which knows how often the demand has risen by so much before.
        requests_per_s: Demand at which the replica would be needed again.
        unneeded_s: For how long it has not been needed.
        start_cost_s: Price of a start; see `start_cost_s`.
    """
    if start_cost_s <= 0:
        return 0.0
    known = False
    for within_s in _WITHIN_S:
        chance = forecast.return_chance(requests_per_s, within_s)
        if chance is None:
            break
        known = True
        # If the demand returns, this happens in the middle of the time on average.
        if chance * start_cost_s > within_s * (1 - 0.5 * chance):
            return within_s
    if known or forecast.highest_level < requests_per_s:
        return 0.0
    return max(0.0, start_cost_s - unneeded_s)

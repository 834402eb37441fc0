"""Growth of a quantity at comparable load: a robust line through noisy samples.

The slope is the median of the slopes of all pairs of samples (H. Theil, *A rank-invariant method of linear and
polynomial
regression analysis*, 1950; P. K. Sen, *Estimates of the regression coefficient based on Kendall's tau*, JASA 63, 1968):
up to 29 % of the samples may be outliers, such as a burst of requests or a garbage collection. A server uses more under
more load, so only pairs at comparable load count, as only pairs of the same month count for rivers (R. M. Hirsch, J. R.
Slack and R. A. Smith, *Techniques of trend analysis for monthly water quality data*, Water Resources Research 18,
1982). M. Hirsch, J. R. Slack and R. A. Smith, *Techniques of trend analysis for monthly water quality data*, Water
Resources Research 18, 1982). Kendall's tau is the degree to which these pairs agree about the direction.

The cost is one slope for each pair: 1,770 for 60 samples, about a millisecond.
"""

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

_MIN_PAIRS = 45
"""Least number of pairs: those of ten samples at one load.

Among random pairs, a tau above 0.6 is found once in a hundred times.
"""
_LOAD_TOLERANCE, _LOAD_TOLERANCE_SHARE = 2.0, 0.1
"""Two loads are comparable if they differ by no more than this, or by this share of the larger one."""


class TrendSample(NamedTuple):
    """Sample of a quantity at one moment."""

    at_s: float
    value: float
    load: float
    """Load of the process at that moment, in requests or sequences."""


class GrowthTrend(NamedTuple):
    """Growth rate and its certainty."""

    per_s: float
    agreement: float
    """Kendall's tau, from -1 (every pair shrank) to 1 (every pair grew); 0 is no direction."""


def fit_trend(samples: Sequence[TrendSample]) -> GrowthTrend | None:
    """Returns the trend of the samples; None: there are too few at comparable load."""
    slopes = [
        (later.value - earlier.value) / (later.at_s - earlier.at_s)
        for earlier, later in combinations(samples, 2)
        if abs(later.load - earlier.load) <= max(_LOAD_TOLERANCE, _LOAD_TOLERANCE_SHARE * max(later.load, earlier.load))
    ]
    if len(slopes) < _MIN_PAIRS:
        return None
    rising = sum(slope > 0 for slope in slopes) - sum(slope < 0 for slope in slopes)
    return GrowthTrend(median(slopes), rising / len(slopes))

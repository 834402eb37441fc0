"""Resampling of dependent requests, many times at once.

Requests of one run share queues and batches, so a slow request has slow neighbours. The textbook bootstrap draws
requests one by one. It then assumes more independent requests than there are, and finds differences between two runs of
the same server. So neighbours are drawn together, in blocks that are long enough to contain the dependence.
"""

import numpy as np
from numpy.typing import NDArray

from maitred.load.measure.times import Floats

Weights = NDArray[np.float32]
"""Number of times that each request (column) was drawn in each resample (row)."""

MOST_GAP_BINS = 400


def block_length(series: Floats) -> int:
    """Number of neighbours to draw together, from how fast the autocorrelation of the series decays.

    The rule of Politis and White (2004), with the correction of Patton, Politis and White (2009), for blocks in a
    circle: ``(2 G² / D)^(1/3) n^(1/3)`` with ``G = Σ λ(k/M) |k| R(k)`` and ``D = 4/3 (Σ λ(k/M) R(k))²`` over the
    autocovariances R, tapered by a flat-top window λ that ends at twice the lag beyond which none is significant.

    Args:
        series: Values in the order of time, without NaN.

    Returns:
        1 for independent values, at most ``3 √n`` and a third of the series.
    """
    n = len(series)
    most = max(1, min(int(3 * n**0.5), n // 3))
    centred = series - series.mean()
    if n < 8 or not np.any(centred):
        return 1
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.abs(np.fft.rfft(centred, size)) ** 2
    covariance = np.fft.irfft(spectrum, size)[:n] / n
    run = max(5, int(np.log10(n) ** 0.5))
    bound = 2 * np.sqrt(np.log10(n) / n)
    lags = min(int(np.ceil(n**0.5)) + run, n - 1)
    small = np.abs(covariance[1 : lags + 1] / covariance[0]) < bound
    quiet = np.convolve(small, np.ones(run), "valid") == run
    last = int(np.argmax(quiet)) if quiet.any() else int(np.flatnonzero(~small)[-1]) + 1
    reach = min(2 * max(last, 1), lags)
    k = np.arange(1, reach + 1)
    taper = np.minimum(1.0, 2 * (1 - k / reach))
    total = covariance[0] + 2 * (taper * covariance[1 : reach + 1]).sum()
    spread = 2 * (taper * k * covariance[1 : reach + 1]).sum()
    if total <= 0:
        return 1
    ideal = (2 * spread**2 / (4 / 3 * total**2)) ** (1 / 3) * n ** (1 / 3)
    return int(np.clip(np.ceil(ideal), 1, most))


def draw_blocks(requests: int, block: int, resamples: int, rng: np.random.Generator) -> Weights:
    """Draws circular blocks (Künsch 1989; Politis and Romano 1992) from anywhere until the run is full.

    All requests are equally likely, because the beginning follows the end.

    Returns:
        Shape ``(resamples, requests)``; every row adds up to `requests`.
    """
    blocks, rest = divmod(requests, block)
    # A block from s to e adds 1 at s and subtracts it at e. The running sum over two rounds, folded into one, is the
    # number of times that each request was drawn.
    edges = np.zeros((resamples, 2 * requests + 1), dtype=np.float32)
    rows = np.arange(resamples)
    for length in [block] * blocks + ([rest] if rest else []):
        start = rng.integers(0, requests, resamples)
        edges[rows, start] += 1
        edges[rows, start + length] -= 1
    covered = np.cumsum(edges, axis=1)
    weights: Weights = covered[:, :requests] + covered[:, requests : 2 * requests]
    return weights


class SortedValues:
    """Values of requests, with quantiles under many weightings at once.

    Args:
        values: One value per request; NaN: the request has none.
    """

    def __init__(self, values: Floats) -> None:
        self._order = np.argsort(values)[: int((~np.isnan(values)).sum())]
        self._values = values[self._order]

    def __len__(self) -> int:
        return len(self._values)

    def mean(self, weights: Weights) -> Floats:
        """Returns the mean for each row of weights; NaN: no request with a value was drawn."""
        drawn = weights[:, self._order].astype(np.float64)
        return _divide(drawn @ self._values, drawn.sum(axis=1))

    def quantiles(self, weights: Weights, ranks: tuple[float, ...]) -> Floats:
        """Returns the quantiles of each row, for each rank, interpolated linearly as if values were repeated.

        Shape (ranks, rows).
        """
        found = np.full((len(ranks), len(weights)), np.nan)
        if not len(self):
            return found
        upto = np.cumsum(weights[:, self._order], axis=1)
        count = upto[:, -1:].astype(np.float64)
        for row, rank in enumerate(ranks):
            place = rank * np.maximum(count - 1, 0)
            whole = np.floor(place)
            low = (upto > whole).argmax(axis=1)
            high = (upto > np.minimum(whole + 1, count - 1)).argmax(axis=1)
            share = (place - whole)[:, 0]
            found[row] = self._values[low] * (1 - share) + self._values[high] * share
        found[:, count[:, 0] == 0] = np.nan
        return found


class BinnedGaps:
    """Gaps of each request, with pooled quantiles under many weightings of the requests.

    A request is drawn with all of its gaps, because these depend on each other most of all. Repeating half a million
    gaps a thousand times would take minutes. Instead, the gaps of each request are counted into bins, and a resample is
    one row of a matrix product. Each bin has the same number of all gaps; bins are finer towards the top.

    Args:
        values: Gaps of all requests.
        request: Index of the request that each gap belongs to.
        requests: Number of requests.
    """

    def __init__(self, values: Floats, request: NDArray[np.int64], requests: int) -> None:
        self._count = len(values)
        if not self._count:
            return
        ranks = np.concatenate([np.linspace(0, 0.9, MOST_GAP_BINS // 2), np.linspace(0.9, 1, MOST_GAP_BINS // 2)[1:]])
        edges = np.unique(np.quantile(values, ranks))
        if len(edges) == 1:
            edges = np.append(edges, edges)
        self._edges = edges
        bins = len(edges) - 1
        place = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, bins - 1)
        counts = np.bincount(request * bins + place, minlength=requests * bins)
        self._counts = counts.reshape(requests, bins).astype(np.float32)

    def __len__(self) -> int:
        return self._count

    def quantiles(self, weights: Weights, ranks: tuple[float, ...]) -> Floats:
        """Returns the quantiles of each row, for each rank, interpolated within the bin. Shape (ranks, rows)."""
        found = np.full((len(ranks), len(weights)), np.nan)
        if not self._count:
            return found
        upto = np.cumsum((weights @ self._counts).astype(np.float64), axis=1)
        rows = np.arange(len(weights))
        for row, rank in enumerate(ranks):
            target = rank * upto[:, -1]
            place = (upto > target[:, None]).argmax(axis=1)
            before = np.where(place > 0, upto[rows, place - 1], 0.0)
            inside = _divide(target - before, upto[rows, place] - before)
            low, high = self._edges[place], self._edges[place + 1]
            found[row] = low + (high - low) * np.clip(inside, 0, 1)
        return found


def simultaneous(deviations: Floats, freedom: Floats, *, confidence: float, rng: np.random.Generator) -> float:
    """Number of standard errors that an interval needs so that the intervals of all metrics hold at once.

    This is the quantile of the largest standardised deviation over the metrics (max-t). Correlated metrics, such as the
    percentiles of one distribution, widen the intervals little; a Bonferroni bound would count each of them in full.
    The standard error is itself an estimate. So the deviations of each resample are divided by the possible error of
    such an estimate (the step from the normal distribution to Student's t, for correlated metrics).

    Args:
        deviations: Standardised deviations; shape ``(resamples, metrics)``.
        freedom: Degrees of freedom of each metric's standard error.
        confidence: Probability that all intervals hold.
        rng: Random generator for the errors of the standard errors.
    """
    scale = np.sqrt(rng.chisquare(freedom, deviations.shape) / freedom)
    return float(np.quantile(np.max(np.abs(deviations) / scale, axis=1), confidence))


def _divide(a: Floats, b: Floats) -> Floats:
    out: Floats = np.full(np.shape(a), np.nan)
    return np.divide(a, b, out=out, where=b > 0)

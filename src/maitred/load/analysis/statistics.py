"""Resampling of requests that depend on each other, many times at once.

Requests of one run share queues and batches: a slow one has slow neighbours. To draw them one by one, as the textbook
bootstrap does, pretends that there were many more independent ones than there were, and finds differences between two
runs of the same thing. So neighbours are drawn together, in blocks long enough to hold the dependence.
"""

import numpy as np
from numpy.typing import NDArray

from maitred.load.measure.times import Floats

Weights = NDArray[np.float32]
"""How often each request (column) was drawn in each resample (row)."""

MOST_GAP_BINS = 400


def block_length(series: Floats) -> int:
    """How many neighbours to draw together, from how fast the series forgets.

    The rule of Politis and White (2004), with the correction of Patton, Politis and White (2009), for blocks in a
    circle: ``(2 G² / D)^(1/3) n^(1/3)`` with ``G = Σ λ(k/M) |k| R(k)`` and ``D = 4/3 (Σ λ(k/M) R(k))²`` over the
    autocovariances R, tapered by a flat-top window λ that ends at twice the lag beyond which none is significant.

    Args:
        series: In order of time, without NaN.

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
    """Circular block bootstrap (Künsch 1989; Politis and Romano 1992): blocks from anywhere, until the run is full.

    Every request is as likely to be drawn as every other, since the end is followed by the beginning.

    Returns:
        Shape ``(resamples, requests)``; every row adds up to `requests`.
    """
    blocks, rest = divmod(requests, block)
    # A block from s to e adds 1 from s on and takes it away from e on; the running sum over two rounds, folded into
    # one, is how often each request was drawn.
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
    """Values of requests, of which quantiles can be taken under many weightings.

    Args:
        values: One per request; NaN: it has none.
    """

    def __init__(self, values: Floats) -> None:
        self._order = np.argsort(values)[: int((~np.isnan(values)).sum())]
        self._values = values[self._order]

    def __len__(self) -> int:
        return len(self._values)

    def mean(self, weights: Weights) -> Floats:
        """Per row of weights; NaN: nothing was drawn."""
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
    """The many gaps of each request, of which pooled quantiles can be taken under many weightings of the requests.

    A request is drawn with all of its gaps, since they depend on each other most of all. To repeat half a million gaps
    a thousand times would take minutes; instead each request's gaps are counted into bins with equal numbers of all
    gaps, finer towards the top, and a resample is one row of a matrix product.

    Args:
        values: All gaps.
        request: Which request each belongs to.
        requests: How many there are.
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
    """How many standard errors an interval must reach so that all metrics' intervals hold at once.

    The quantile of the largest standardised deviation over the metrics (max-t). Metrics that move together, as the
    percentiles of one distribution do, cost little, where a Bonferroni bound would count each in full. The standard
    error is itself an estimate, so each resample's deviations are divided by what such an estimate may be off by (the
    step from the normal to Student's t, for correlated metrics).

    Args:
        deviations: Standardised; shape ``(resamples, metrics)``.
        freedom: Degrees of freedom of each metric's standard error.
        confidence: That all hold.
        rng: For the errors of the standard errors.
    """
    scale = np.sqrt(rng.chisquare(freedom, deviations.shape) / freedom)
    return float(np.quantile(np.max(np.abs(deviations) / scale, axis=1), confidence))


def _divide(a: Floats, b: Floats) -> Floats:
    out: Floats = np.full(np.shape(a), np.nan)
    return np.divide(a, b, out=out, where=b > 0)

"""Traces that the benchmark of autoscaling plays: those of real services, planted waves, and a constant load."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.support.scaling.fleet import RequestTrace
from benchmarks.support.scaling.fleet_kernels import Counts, Floats
from maitred.load.workload.lengths import Histogram
from maitred.load.workload.traces.azure import read_azure
from maitred.load.workload.traces.servegen import WINDOW_S, ServeGenClient, ServeGenLengths, servegen_clients

PROMPT_TOKENS, OUTPUT_TOKENS, LENGTHS_SIGMA = 600, 200, 0.8
"""Means of the lengths of planted requests, which are log-normal, and the standard deviation of their logarithm."""


def servegen(
    path: Path, name: str, *, requests_per_s: float, seed: int, end_s: float = math.inf, output_scale: float = 1.0
) -> RequestTrace:
    """Draws the requests of all clients of a ServeGen archive.

    The rules are those of `maitred.load.workload.traces.servegen`; the draws are made for whole windows at once,
    because there are millions.

    Args:
        path: Archive.
        name: Of the trace.
        requests_per_s: Mean rate over the whole archive.
        seed: Of the draws.
        end_s: Later windows are left out.
        output_scale: Output tokens are multiplied by this.
    """
    clients = servegen_clients(path)
    seconds = max(client.windows[-1].start_s + WINDOW_S for client in clients)
    published = sum(window.rate_per_s for client in clients for window in client.windows) * WINDOW_S
    factor = requests_per_s * seconds / published
    drawn = [_client(client, factor, np.random.default_rng([seed, client.number]), end_s) for client in clients]
    arrived, prompts, outputs = (np.concatenate(column) for column in zip(*drawn, strict=True))
    return _sorted(name, min(seconds, end_s), arrived, prompts, outputs * output_scale)


def _client(
    client: ServeGenClient, factor: float, rng: np.random.Generator, end_s: float
) -> tuple[Floats, Floats, Floats]:
    arrived: list[Floats] = []
    left = -1.0
    for window in client.windows:
        rate_per_s = window.rate_per_s * factor
        if rate_per_s == 0 or window.start_s >= end_s:
            continue
        expected = rate_per_s * WINDOW_S
        gaps = _gaps(window.family, window.shape, int(expected + 6 * math.sqrt(expected) + 20), rng)
        if left < 0:
            left = float(gaps[0] * rng.random())
        times = left + np.concatenate([[0.0], np.cumsum(gaps[1:])])
        while times[-1] < expected:
            more = _gaps(window.family, window.shape, len(times), rng)
            times = np.concatenate([times, times[-1] + np.cumsum(more)])
        inside = int(np.searchsorted(times, expected))
        arrived.append(window.start_s + times[:inside] / rate_per_s)
        left = float(times[inside] - expected)
    at = np.concatenate(arrived) if arrived else np.zeros(0)
    prompts, outputs = np.zeros(len(at)), np.zeros(len(at))
    rates = np.diff(np.asarray(client.rates), prepend=0.0)
    lenders = rng.choice(len(client.lengths), size=len(at), p=rates / rates.sum())
    for lender, lengths in enumerate(client.lengths):
        rows = np.flatnonzero(lenders == lender)
        prompts[rows], outputs[rows] = _lengths(lengths, at[rows], rng)
    return at, prompts, outputs


def _gaps(family: str, shape: float, number: int, rng: np.random.Generator) -> Floats:
    """Draws gaps with mean 1."""
    if family == "Weibull":
        return rng.weibull(shape, number) / math.gamma(1 + 1 / shape)
    return rng.gamma(shape, 1 / shape, number)


def _lengths(lengths: ServeGenLengths, at: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    prompts, outputs = np.zeros(len(at)), np.zeros(len(at))
    spans = np.maximum(0, np.searchsorted(np.asarray(lengths.starts_s), at, side="right") - 1)
    for span in np.unique(spans):
        rows = np.flatnonzero(spans == span)
        prompt, output = lengths.pairs[span]
        prompts[rows], outputs[rows] = _draws(prompt, len(rows), rng), _draws(output, len(rows), rng)
    return prompts, outputs


def _draws(histogram: Histogram, number: int, rng: np.random.Generator) -> Floats:
    sums = np.cumsum(histogram.weights)
    rows = np.searchsorted(sums, rng.random(number) * sums[-1], side="right")
    drawn: Floats = np.asarray(histogram.values, float)[np.minimum(rows, len(sums) - 1)]
    return drawn


def azure(path: Path) -> RequestTrace:
    """Reads Azure's trace of conversations."""
    sessions = list(read_azure(path).sessions)
    turns = [session.turns[0] for session in sessions]
    arrived = np.array([session.at_s or 0.0 for session in sessions])
    tokens = ([turn.prompt_tokens for turn in turns], [turn.output_tokens for turn in turns])
    return _sorted("azure conversations", float(arrived[-1]), arrived, np.array(tokens[0]), np.array(tokens[1]))


def planted(name: str, levels: Sequence[tuple[float, float]], seed: int) -> RequestTrace:
    """Draws a Poisson stream whose rate goes in straight lines from point to point.

    Args:
        name: Of the trace.
        levels: Time and requests per second of each point, in the order of time.
        seed: Of the draws.
    """
    rng = np.random.default_rng(seed)
    times, rates = (np.array(column, float) for column in zip(*levels, strict=True))
    seconds, highest = float(times[-1]), float(rates.max())
    at = rng.uniform(0, seconds, rng.poisson(seconds * highest))
    at = np.sort(at[rng.random(len(at)) * highest < np.interp(at, times, rates)])
    shift = LENGTHS_SIGMA**2 / 2
    prompts, outputs = (
        rng.lognormal(math.log(mean) - shift, LENGTHS_SIGMA, len(at)) for mean in (PROMPT_TOKENS, OUTPUT_TOKENS)
    )
    return _sorted(name, seconds, at, prompts, outputs)


def waves(calm_per_s: float, seed: int) -> RequestTrace:
    """Draws an hour of calm, and three waves of 2, 3 and 10 times its rate with flanks of a minute."""
    levels = [(0.0, calm_per_s)]
    for begin_s, times in ((3600.0, 2.0), (7200.0, 3.0), (10_800.0, 10.0)):
        top = calm_per_s * times
        levels += [(begin_s, calm_per_s), (begin_s + FLANK_S, top)]
        levels += [(begin_s + FLANK_S + WAVE_S, top), (begin_s + 2 * FLANK_S + WAVE_S, calm_per_s)]
    return planted("waves", [*levels, (14_400.0, calm_per_s)], seed)


FLANK_S, WAVE_S = 60.0, 1200.0


def constant(requests_per_s: float, seconds: float, seed: int) -> RequestTrace:
    """Draws a Poisson stream of one rate."""
    return planted("constant", [(0.0, requests_per_s), (seconds, requests_per_s)], seed)


def _sorted(name: str, seconds: float, arrived: Floats, prompts: Floats, outputs: Floats) -> RequestTrace:
    rows = np.argsort(arrived, kind="stable")
    tokens: list[Counts] = [np.maximum(1, np.rint(column[rows])).astype(np.int64) for column in (prompts, outputs)]
    return RequestTrace(name, seconds, np.ascontiguousarray(arrived[rows]), *tokens)

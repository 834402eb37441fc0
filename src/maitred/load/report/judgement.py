"""Judgement of a result: whether to trust its figures, and what the run does not show."""

import numpy as np

from maitred.load.measure.record import UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.load.report.document import Callout, CalloutLevel
from maitred.load.report.quantity import count, duration, exact, plural, share

FEW = 100
"""Number of requests below which a p99 is hardly more than the largest value."""
SHORT_S = 10.0
"""Length of a window below which the rates vary much between runs."""

PHRASES = {
    UserOutcome.REFUSED: "refused",
    UserOutcome.FAILED: "failed",
    UserOutcome.CUT: "cut off",
    UserOutcome.TIMED_OUT: "timed out",
    UserOutcome.UNFINISHED: "still open at the end",
}


def verdict(result: LoadResult) -> Callout:
    """Returns the main statement: whether the figures are the server's, and how good they are."""
    total = result.summary.requests
    if not total:
        return Callout(
            CalloutLevel.BAD, "Nothing was measured: no request was due after the warm-up. Let the run last longer."
        )
    complete = result.summary.outcomes.get(UserOutcome.COMPLETE, 0)
    if not complete:
        return Callout(CalloutLevel.BAD, f"None of {plural(total, 'request')} was answered completely.")
    if result.tester.limit != "none":
        return Callout(CalloutLevel.BAD, result.tester.verdict)
    lost = {outcome: result.summary.outcomes.get(outcome, 0) for outcome in PHRASES}
    missing = sum(lost.values())
    answered = "The figures are the server's own: the tester kept up."
    if missing:
        parts = ", ".join(f"{count(number)} {PHRASES[outcome]}" for outcome, number in lost.items() if number)
        return Callout(
            CalloutLevel.CARE,
            f"{share(missing / total)} of {plural(total, 'request')} did not get a whole answer ({parts}). {answered}",
        )
    attainment = result.summary.attainment
    if has_objectives(result) and attainment is not None:
        wanted = exact(share(result.objectives.attainment))
        if attainment < result.objectives.attainment:
            return Callout(
                CalloutLevel.CARE,
                f"All requests were answered, but {share(attainment)} met the objectives where {wanted} should. "
                f"{answered}",
            )
        return Callout(
            CalloutLevel.GOOD,
            f"All requests were answered, and {share(attainment)} met the objectives ({wanted} should). {answered}",
        )
    return Callout(CalloutLevel.GOOD, f"All requests were answered. {answered}")


def notes(result: LoadResult) -> list[Callout]:
    """Returns further limits of the figures; empty for a long, clean run."""
    return [Callout(CalloutLevel.CARE, text) for text in (*_of_the_sample(result), *_of_the_server(result)) if text]


def has_objectives(result: LoadResult) -> bool:
    """Whether the run has any objectives."""
    objectives = result.objectives
    return any(bound is not None for bound in (objectives.ttft_s, objectives.tpot_s, objectives.e2e_s))


def _of_the_sample(result: LoadResult) -> list[str]:
    summary, texts = result.summary, []
    unfinished = summary.outcomes.get(UserOutcome.UNFINISHED, 0)
    if unfinished:
        texts.append(
            f"{plural(unfinished, 'request')} had not ended when the run did: their times are missing from the "
            "latencies, which are too good by that. They count as misses of the objectives."
        )
    if 0 < summary.requests < FEW:
        texts.append(
            f"With {plural(summary.requests, 'request')}, p99 is hardly more than the slowest of them. Ask for more "
            f"requests, at least {FEW}."
        )
    if summary.requests and summary.seconds < SHORT_S:
        texts.append(
            f"Rates are from a window of {duration(summary.seconds)}, so another run may well show others. Let it last "
            "longer."
        )
    return texts


def _of_the_server(result: LoadResult) -> list[str]:
    texts = []
    complete = result.counted_flags() & result.times.complete
    tokens, asked = result.column("output_tokens")[complete], result.column("asked_tokens")[complete]
    if len(tokens) and not tokens.any():
        texts.append(
            "The server did not say how many tokens its answers have. Every piece of text counts as one token; times "
            "per output token are missing."
        )
    else:
        short = tokens < asked
        if len(tokens) and short.mean() > 0.05:
            texts.append(
                f"{share(float(short.mean()))} of the complete answers are shorter than was asked for (in all "
                f"{share(float(tokens.sum() / max(1, asked.sum())))} of the tokens). The server did not keep them from "
                "ending early, so compare only with runs whose answers have the same lengths."
            )
    pieces = result.times.pieces[complete]
    streamed = pieces > 0
    if streamed.any() and tokens.any():
        per_piece = float(tokens[streamed].sum() / pieces[streamed].sum())
        if per_piece > 1.5:
            texts.append(
                f"The server sends {per_piece:.1f} tokens in one piece on average. The times between tokens are times "
                "between pieces; compare the time per output token instead."
            )
    retried = int(np.sum(result.column("attempts")[result.counted_flags()] > 1))
    if retried:
        texts.append(f"{plural(retried, 'request')} had to be sent more than once. The wait for that counts.")
    return texts

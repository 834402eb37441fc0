"""Log of requests in an engine's process, under the ids that the clients see.

The log contains counts and times, but no tokens. The request id is the only text of a client in it. Successful requests
are logged at debug level, because the gateway gets the same data with the answer (`SequenceStats`).
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from maitred.core.request import EngineRequest, SequenceStats, TokenDelta
from maitred.engine.scheduler.sequence import Sequence

logger = logging.getLogger("maitred.engine")

_MOST_NAMED = 16


def log_refusal(request: EngineRequest, reason: str) -> None:
    """Logs a request that can never run here."""
    _log(logging.INFO, request, "refused: %s", reason)


def log_grammar_failure(request: EngineRequest) -> None:
    """Logs a request whose answer cannot follow its grammar, or has no token left; the client's text is omitted."""
    _log(logging.INFO, request, "given up: its answer cannot be held to its grammar, or no token is allowed")


def log_end(sequence: Sequence, delta: TokenDelta) -> None:
    """Logs a choice that has finished."""
    if logger.isEnabledFor(logging.DEBUG):
        stats = delta.stats or SequenceStats()
        _log(
            logging.DEBUG,
            sequence.request,
            "choice %d ended by %s: %d prompt tokens, %d of them cached, and %d output tokens; waited %.3f s, "
            "prefill %.3f s, decode %.3f s, %d preemptions",
            *(sequence.index, delta.finish, sequence.prompt_tokens, sequence.cached_tokens or 0),
            *(sequence.output_tokens, stats.waited_s, stats.prefill_s, stats.decode_s, sequence.preemptions),
        )


def log_cancellation(sequence: Sequence) -> None:
    """Logs a choice that was cancelled."""
    if logger.isEnabledFor(logging.DEBUG):
        _log(
            logging.DEBUG,
            sequence.request,
            "choice %d cancelled after %d output tokens",
            *(sequence.index, sequence.output_tokens),
        )


def log_preemption(sequence: Sequence) -> None:
    """Logs a choice that was preempted."""
    if logger.isEnabledFor(logging.DEBUG):
        _log(
            logging.DEBUG,
            sequence.request,
            "choice %d gives its place to others after %d output tokens",
            *(sequence.index, sequence.output_tokens),
        )


def log_encoding(request: EngineRequest, waited_s: float, batch: int) -> None:
    """Logs a text whose vector was computed."""
    if logger.isEnabledFor(logging.DEBUG):
        _log(
            logging.DEBUG,
            request,
            "a text of %d tokens encoded in a batch of %d; waited %.3f s",
            *(len(request.prompt), batch, waited_s),
        )


@contextmanager
def log_failed_step(requests: Iterable[EngineRequest]) -> Iterator[None]:
    """Logs the requests of a failed step, because one of them may be the cause of the failure.

    Args:
        requests: Requests of the step; the iterable is read only after a failure.
    """
    try:
        yield
    except Exception:
        names = [*dict.fromkeys(request.known_as or request.id for request in requests)]
        more = ", …" if len(names) > _MOST_NAMED else ""
        named = ", ".join(names[:_MOST_NAMED])
        logger.critical("a step failed that had %d requests in it: %s%s", len(names), named, more)
        raise


def _log(level: int, request: EngineRequest, message: str, *values: object) -> None:
    ids = {"request_id": request.known_as or request.id, "trace_id": request.trace_id}
    logger.log(level, message, *values, extra={name: value for name, value in ids.items() if value})

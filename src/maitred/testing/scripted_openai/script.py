"""Script of the server: plain data, in the same form in Python and in JSON.

Random values depend only on the seed and the number of the request, so two servers with the same script treat the same
requests in the same order alike.
"""

import math
import random
from enum import StrEnum
from statistics import NormalDist
from typing import Annotated

from msgspec import Meta, Struct, field

NonNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0)]

TABLE_SIZE = 1 << 14


class DelayDistribution(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lognormal distribution of seconds, or a fixed time where `cv` is 0."""

    mean_s: NonNegative
    cv: NonNegative = 0.0
    """Standard deviation divided by the mean."""
    factor: NonNegative = 1.0
    """Factor on every value: it simulates a regression with the same draws."""

    def draw(self, rng: random.Random) -> float:
        """Draws one value in seconds."""
        mean_s = self.mean_s * self.factor
        if self.cv == 0 or mean_s == 0:
            return mean_s
        log = self._log()
        return rng.lognormvariate(log.mean, log.stdev) * self.factor

    def table(self, rng: random.Random) -> list[float]:
        """Returns shuffled quantiles at equal steps, which cost far less per value than draws."""
        if self.cv == 0 or self.mean_s == 0:
            return [self.mean_s * self.factor] * TABLE_SIZE
        log = self._log()
        values = [NormalDist().inv_cdf((rank + 0.5) / TABLE_SIZE) for rank in range(TABLE_SIZE)]
        table = [math.exp(log.mean + log.stdev * value) * self.factor for value in values]
        rng.shuffle(table)
        return table

    def _log(self) -> NormalDist:
        variance = math.log1p(self.cv**2)
        return NormalDist(math.log(self.mean_s) - variance / 2, math.sqrt(variance))


class ScriptedPause(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pause of the whole server, like a stopped process: it neither accepts, reads nor sends.

    After the pause it does everything overdue at once.
    """

    at_s: NonNegative
    """Start of the pause, in seconds since the first request."""
    for_s: Positive


class FaultKind(StrEnum):
    """Kinds of faults or oddities of an answer, in the order in which they are applied."""

    STATUS = "status"
    """An HTTP error, at once."""
    CLOSE = "close"
    """The connection is closed before the response."""
    ABORT = "abort"
    """The connection is aborted by a TCP reset before the response."""
    SILENT = "silent"
    """The server never answers."""
    BYTES = "bytes"
    """`text` in place of a response, whatever it is; then the connection is closed."""
    HTML = "html"
    """An HTML page with the status 200, as a proxy in between sends it."""
    EMPTY = "empty"
    """The status 200 and nothing else."""
    ERROR_BODY = "error_body"
    """The status 200 and an error as the body."""
    NO_USAGE = "no_usage"
    """The answer does not report its usage."""
    TWICE = "twice"
    """After `after` events, the last one is sent again."""
    GARBAGE = "garbage"
    """After `after` events one that is not JSON; then the answer goes on."""
    EVENT = "event"
    """After `after` events one with `text` as its data; then the answer goes on."""
    STALL = "stall"
    """After `after` events, nothing is sent for `for_s`, or permanently."""
    ERROR_EVENT = "error_event"
    """After `after` events one that reports an error; then the body ends."""
    CUT = "cut"
    """After `after` events the connection is closed in the middle of the body."""
    RESET = "reset"
    """After `after` events the connection is reset, which may overtake what was sent before."""
    HALF_EVENT = "half_event"
    """After `after` events half of one, and then the body ends as it should."""
    SHORT_LENGTH = "short_length"
    """The head promises more bytes than come, and the body ends after `after` events."""
    DRIP = "drip"
    """After `after` events, only comments follow, every `for_s` seconds without end: alive, but no answer."""
    NO_DONE = "no_done"
    """After `after` events the body ends as it should, but the answer has not: no ``[DONE]``."""
    NO_END = "no_end"
    """The answer is whole, but the connection is closed where the body's end should be."""
    BUNCHED = "bunched"
    """Four events in one segment."""
    PINGS = "pings"
    """A comment is sent halfway to every event."""
    CRLF = "crlf"
    """Lines end in CR LF."""
    SPLIT = "split"
    """Every event in three chunks and segments a millisecond apart, cut anywhere."""


class ScriptedFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fault and the requests that it affects: by number, by model, or by a limit on all."""

    kind: FaultKind
    requests: list[Count] = field(default_factory=list)
    """Numbers of requests, which count up from 0. A retry is a request of its own."""
    models: list[str] = field(default_factory=list)
    """Model names in requests: so one server can have a fault for each model."""
    share: Share = 0.0
    after: Count = 1
    """Number of events that are sent before the fault."""
    for_s: Positive | None = None
    """Duration of a stall; time between two comments of a drip."""
    status: Annotated[int, Meta(ge=400, le=599)] = 503
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of an HTTP error, such as ``{"retry-after": "1"}``."""
    text: str = ""
    """Text of an event, or of bytes."""


class ServerScript(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Script of all answers: their times and lengths, and their faults."""

    model: str = "scripted"
    ttft: DelayDistribution = DelayDistribution(mean_s=0.05)
    """Time to the first event from the request's receipt, or from the end of a `max_concurrent` wait."""
    itl: DelayDistribution = DelayDistribution(mean_s=0.02)
    """Time between two events of an answer."""
    tokens_per_event: Annotated[int, Meta(ge=1)] = 1
    default_tokens: Annotated[int, Meta(ge=1)] = 16
    """Length of an answer whose request does not set it."""
    template_tokens: Count = 4
    """Prompt tokens in addition to the prompt's words."""
    cached_share: Share = 0.0
    """Share of a prompt that is reported as cached."""
    early_role: bool = True
    """Whether a chat stream opens at once with an event that has a role and no text."""
    strict: bool = False
    """Whether fields are refused that OpenAI does not know, such as ``ignore_eos``."""
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    """Largest number of concurrent requests; further requests wait."""
    tokens_per_s: Positive | None = None
    """Tokens per second of all streams together: with many streams, the gaps of each grow."""
    pauses: list[ScriptedPause] = field(default_factory=list)
    faults: list[ScriptedFault] = field(default_factory=list)
    metrics: str = ""
    """Page of ``GET /metrics``, in which `{open}` stands for the number of answers in progress. Without it the page is
    stale from the start. Empty: there is no such page."""
    metrics_pages: Count | None = None
    """Number of these pages that are answered; later ones never are. None: all are answered."""
    seed: Count = 0

    def faults_of(self, number: int, rng: random.Random, model: str = "") -> list[ScriptedFault]:
        """Returns the faults of a request, in the order in which they are applied."""
        kinds = list(FaultKind)
        hits = [
            fault
            for fault in self.faults
            if (rng.random() < fault.share) | (number in fault.requests) | (model in fault.models)
        ]
        return sorted(hits, key=lambda fault: kinds.index(fault.kind))

    def rng_of(self, number: int) -> random.Random:
        """Returns the random generator of one request."""
        return random.Random((self.seed << 40) + number)

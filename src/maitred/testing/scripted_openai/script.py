"""Script of the server: plain data, the same from Python and from JSON.

Everything random depends on the seed and on the number of the request alone, so two servers with the same script do
the same to the same requests in the same order.
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
    """Standard deviation over mean."""
    factor: NonNegative = 1.0
    """On every value: plants a regression and keeps the draws."""

    def draw(self, rng: random.Random) -> float:
        """One value, in seconds."""
        mean_s = self.mean_s * self.factor
        if self.cv == 0 or mean_s == 0:
            return mean_s
        log = self._log()
        return rng.lognormvariate(log.mean, log.stdev) * self.factor

    def table(self, rng: random.Random) -> list[float]:
        """Values to take in order: the quantiles at equal steps, shuffled. Far cheaper per value than drawing."""
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
    """The whole server is silent, like a stopped process: it neither accepts, reads nor sends.

    Afterwards it does at once what had become due.
    """

    at_s: NonNegative
    """Since the first request."""
    for_s: Positive


class FaultKind(StrEnum):
    """Kinds of faults in an answer, or of what is merely odd about it, in the order in which several are applied."""

    STATUS = "status"
    """An HTTP error, at once."""
    CLOSE = "close"
    """The connection is closed before the response."""
    ABORT = "abort"
    """The same with a TCP reset."""
    SILENT = "silent"
    """Nothing at all, for ever."""
    BYTES = "bytes"
    """`text` in place of a response, whatever it is; then the connection is closed."""
    HTML = "html"
    """A page for people, with the status 200, as a proxy on the way sends it."""
    EMPTY = "empty"
    """The status 200 and nothing else."""
    ERROR_BODY = "error_body"
    """The status 200 and an error as the body."""
    NO_USAGE = "no_usage"
    """Nobody says how many tokens there were."""
    TWICE = "twice"
    """After `after` events the last one again."""
    GARBAGE = "garbage"
    """After `after` events one that is not JSON; then the answer goes on."""
    EVENT = "event"
    """After `after` events one with `text` as its data; then the answer goes on."""
    STALL = "stall"
    """After `after` events nothing for `for_s`, or for ever."""
    ERROR_EVENT = "error_event"
    """After `after` events one that reports an error; then the body ends."""
    CUT = "cut"
    """After `after` events the connection is closed in the middle of the body."""
    RESET = "reset"
    """The same with a TCP reset, which may overtake what was sent before."""
    HALF_EVENT = "half_event"
    """After `after` events half of one, and then the body ends as it should."""
    SHORT_LENGTH = "short_length"
    """The head promises more bytes than come, and the body ends after `after` events."""
    DRIP = "drip"
    """A comment every `for_s` seconds after `after` events, for ever: alive, and no answer."""
    NO_DONE = "no_done"
    """After `after` events the body ends as it should, but the answer has not: no ``[DONE]``."""
    NO_END = "no_end"
    """The answer is whole, but the connection is closed where the body's end should be."""
    BUNCHED = "bunched"
    """Four events in one segment."""
    PINGS = "pings"
    """A comment halfway to every event."""
    CRLF = "crlf"
    """Lines end in CR LF."""
    SPLIT = "split"
    """Every event in three chunks and segments a millisecond apart, cut anywhere."""


class ScriptedFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault and the requests that it meets: those with these numbers, those for these models, and so many of all."""

    kind: FaultKind
    requests: list[Count] = field(default_factory=list)
    """Numbers of requests, which count up from 0. A retry is a request of its own."""
    models: list[str] = field(default_factory=list)
    """As requests name them: so one server can have a fault for each."""
    share: Share = 0.0
    after: Count = 1
    """Events that are sent before."""
    for_s: Positive | None = None
    """Of a stall; between two comments of a drip."""
    status: Annotated[int, Meta(ge=400, le=599)] = 503
    headers: dict[str, str] = field(default_factory=dict)
    """Of an HTTP error, such as ``{"retry-after": "1"}``."""
    text: str = ""
    """Of an event, or of bytes."""


class ServerScript(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Script of all answers: what each is like, and what goes wrong."""

    model: str = "scripted"
    ttft: DelayDistribution = DelayDistribution(mean_s=0.05)
    """From the receipt of a request, or from its turn where `max_concurrent` made it wait, to its first event."""
    itl: DelayDistribution = DelayDistribution(mean_s=0.02)
    """Between two events of an answer."""
    tokens_per_event: Annotated[int, Meta(ge=1)] = 1
    default_tokens: Annotated[int, Meta(ge=1)] = 16
    """Length of an answer whose request does not say."""
    template_tokens: Count = 4
    """Come on top of the prompt's words."""
    cached_share: Share = 0.0
    """So much of a prompt is reported as found in a cache."""
    early_role: bool = True
    """Whether a chat stream opens at once with an event that has a role and no text."""
    strict: bool = False
    """Whether fields are refused that OpenAI does not know, such as ``ignore_eos``."""
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    """Requests over this wait in line."""
    tokens_per_s: Positive | None = None
    """All streams together get no more: with many of them, the gaps of each grow."""
    pauses: list[ScriptedPause] = field(default_factory=list)
    faults: list[ScriptedFault] = field(default_factory=list)
    metrics: str = ""
    """What ``GET /metrics`` answers; `{open}` in it stands for the answers that are under way. Without it the page is
    stale from the start. Empty: there is no such page."""
    metrics_pages: Count | None = None
    """So many of these pages are answered, and no further one ever is. None: all are."""
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
        """The randomness of one request."""
        return random.Random((self.seed << 40) + number)

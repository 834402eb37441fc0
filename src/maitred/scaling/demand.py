"""Demand for a model: what waits, what runs, and what has arrived."""

import math

import msgspec


class ArrivalWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that have arrived for a model in a time window, refused ones included."""

    start_s: float
    length_s: float
    requests: float = 0.0
    prompt_tokens: float = 0.0
    """Prompt tokens of these requests that must be computed: those that are found in a prefix cache do not count."""
    output_tokens: float = 0.0
    """Output tokens of these requests, as far as they are known; the others count with their expected length."""
    cached_tokens: float = 0.0
    """Prompt tokens of these requests that a prefix cache holds."""


class FinishedWork(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that have ended, with the time for which they had slots."""

    requests: float = 0.0
    output_tokens: float = 0.0
    slot_s: float = 0.0
    """Seconds from dispatch to the end, times the slots of each request."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Demand for a model at the time of a decision."""

    waiting: int = 0
    """Requests that wait in the gateway's queue and at replicas."""
    waiting_prompt_tokens: float = 0.0
    """Uncached prompt tokens of the waiting requests, and what is left of prompts that are being computed."""
    waiting_output_tokens: float = 0.0
    """Expected output tokens of the waiting requests."""
    running: int = 0
    """Requests that replicas compute."""
    confined_requests: float = 0.0
    """Waiting and running requests beyond these that would need as much capacity, if quotas confined no tenant."""
    oldest_wait_s: float = 0.0
    window: ArrivalWindow
    """Arrivals since the last decision."""

    @property
    def usable_share(self) -> float:
        """Share of the replicas' slots and KV cache that its tenants can use together; see `confined_requests`."""
        requests = self.waiting + self.running
        return requests / (requests + self.confined_requests) if requests else 1.0

    @property
    def any(self) -> bool:
        """Whether any request waits or runs, or has just arrived."""
        return bool(self.waiting or self.running or self.window.requests)


class RequestMix(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the requests that a model gets: means, and how they vary."""

    prompt_tokens: float
    """Mean uncached prompt tokens."""
    output_tokens: float
    """Mean output tokens."""
    cached_tokens: float = 0.0
    """Mean prompt tokens that a prefix cache holds: they are not computed, but each output token attends to them."""
    prompt_variation: float = 1.0
    """Squared coefficient of variation of the uncached prompt tokens; 1: an exponential distribution."""
    output_variation: float = 1.0
    """Squared coefficient of variation of the output tokens."""

    @property
    def prompt_p95_tokens(self) -> float:
        """95th percentile of the uncached prompt tokens, if they have a lognormal distribution."""
        return self.prompt_tokens * lognormal_p95(self.prompt_variation)

    @property
    def decoding_context_tokens(self) -> float:
        """Mean tokens that an output token attends to; long answers have more of the output tokens."""
        return self.prompt_tokens + self.cached_tokens + 0.5 * self.output_tokens * (1 + self.output_variation)

    @property
    def whole_tokens(self) -> float:
        """Mean tokens of a prompt and its answer."""
        return self.prompt_tokens + self.cached_tokens + self.output_tokens


def lognormal_p95(variation: float) -> float:
    """Returns the 95th percentile of a lognormal distribution in units of its mean, by its squared variation."""
    variance = math.log1p(max(0.0, variation))
    return math.exp(1.645 * math.sqrt(variance) - 0.5 * variance)

"""Demand for a model: what waits, what runs, and what has arrived."""

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
    running_output_tokens: float = 0.0
    """Output tokens that the running requests are still expected to get."""
    oldest_wait_s: float = 0.0
    window: ArrivalWindow
    """What has arrived since the last decision."""


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

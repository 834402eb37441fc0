"""Random lengths: of prompts and answers, of sessions in turns, and of a user's pauses.

A distribution is a short text, so that a flag and a file use the same form. It draws real numbers of at least 0. The
same forms are used for tokens and for seconds; code that needs whole tokens rounds.
"""

import itertools
import math
import random
from array import array
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from maitred.core.errors import InvalidRequest
from maitred.load.workload import terms
from maitred.load.workload.files import open_text
from maitred.load.workload.tables import TableRows

FORMS = "`200`, `uniform:50..400`, `lognormal:mean=200,cv=1`, `exponential:mean=200`, `histogram:100=0.5,400=0.5`"


class LengthDistribution(Protocol):
    """Distribution that numbers are drawn from."""

    @property
    def mean(self) -> float:
        """Mean of the draws."""

    def draw(self, rng: random.Random) -> float:
        """Draws one number of at least 0."""


@dataclass(frozen=True)
class Fixed:
    """Distribution that always gives the same number."""

    mean: float

    def draw(self, rng: random.Random) -> float:
        """Returns the fixed number without using `rng`."""
        return self.mean


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution between two bounds."""

    low: float
    high: float

    @property
    def mean(self) -> float:
        """Middle of the two bounds."""
        return (self.low + self.high) / 2

    def draw(self, rng: random.Random) -> float:
        """Draws a number between the two bounds."""
        return rng.uniform(self.low, self.high)


@dataclass(frozen=True)
class Lognormal:
    """Log-normal lengths, like those of real prompts: most are short, a few are very long.

    Attributes:
        mean: Mean of the numbers themselves, not of their logarithms.
        cv: Standard deviation of the numbers as a multiple of the mean.
    """

    mean: float
    cv: float

    @cached_property
    def _sigma(self) -> float:
        return math.sqrt(math.log1p(self.cv**2))

    @cached_property
    def _mu(self) -> float:
        return math.log(self.mean) - self._sigma**2 / 2

    def draw(self, rng: random.Random) -> float:
        """Draws a number above 0."""
        return rng.lognormvariate(self._mu, self._sigma)


@dataclass(frozen=True)
class Exponential:
    """Exponential waits, which do not depend on how long they have lasted."""

    mean: float

    def draw(self, rng: random.Random) -> float:
        """Draws a number of at least 0."""
        return rng.expovariate(1 / self.mean)


@dataclass(frozen=True)
class Histogram:
    """Histogram: a distribution over some numbers, each with its weight.

    Attributes:
        values: Numbers of the distribution.
        weights: Relative probability of each number; at least one is above 0.
    """

    values: Sequence[float]
    weights: Sequence[float]

    @cached_property
    def _cumulative(self) -> list[float]:
        return list(itertools.accumulate(self.weights))

    @cached_property
    def mean(self) -> float:
        """Mean of the numbers by their weights."""
        bars = zip(self.values, self.weights, strict=True)
        return sum(value * weight for value, weight in bars) / self._cumulative[-1]

    def draw(self, rng: random.Random) -> float:
        """Draws one of the numbers."""
        at = bisect(self._cumulative, rng.random() * self._cumulative[-1])
        return self.values[min(at, len(self.values) - 1)]


def parse_distribution(text: str, *, what: str) -> LengthDistribution:
    """Parses a distribution of lengths.

    Args:
        text: Distribution in one of the `FORMS`.
        what: Name of its setting, for the error.

    Raises:
        InvalidRequest: The text has none of the forms.
    """
    try:
        return _parse(text)
    except ValueError as error:
        raise InvalidRequest(
            f"{what}: {text!r} is no distribution: {error}. Write one of {FORMS}.", param=what
        ) from None


def _parse(text: str) -> LengthDistribution:
    kind, rest = terms.split_kind(text)
    match kind:
        case "uniform":
            left, dots, right = rest.partition("..")
            if not dots:
                raise ValueError("two numbers with `..` between them are needed")
            low, high = terms.number(left), terms.number(right)
            if high < low:
                raise ValueError(f"{high:g} is below {low:g}")
            return Uniform(low, high)
        case "lognormal":
            mean, cv = terms.named_numbers(rest, "mean", "cv")
            return Lognormal(_above_0(mean), cv)
        case "exponential":
            (mean,) = terms.named_numbers(rest, "mean")
            return Exponential(_above_0(mean))
        case "histogram":
            bars = [(terms.number(value), terms.number(weight)) for value, weight in terms.pairs(rest)]
            if not any(weight for _, weight in bars):
                raise ValueError("one of the weights must be above 0")
            return Histogram([value for value, _ in bars], [weight for _, weight in bars])
        case _ if ":" in text:
            raise ValueError(f"there is no kind {kind!r}")
        case _:
            return Fixed(terms.number(text))


def _above_0(mean: float) -> float:
    if mean == 0:
        raise ValueError("the mean must be above 0")
    return mean


PAIR_COLUMNS = (
    ("num_prefill_tokens", "num_decode_tokens"),
    ("prompt_tokens", "output_tokens"),
    ("input_length", "output_length"),
    ("ContextTokens", "GeneratedTokens"),
)
"""Column names of published files of lengths."""


@dataclass(frozen=True)
class LengthPairs:
    """Measured pairs of prompt and answer lengths, so that their correlation is kept.

    Attributes:
        prompt_tokens: Prompt lengths of the measured requests.
        output_tokens: Answer lengths of the same requests.
    """

    prompt_tokens: "array[int]"
    output_tokens: "array[int]"

    @classmethod
    def load(cls, path: Path) -> "LengthPairs":
        """Reads a CSV file, compressed or not, with one of the `PAIR_COLUMNS` in its header.

        Raises:
            InvalidRequest: The file does not exist, has none of the columns, has no rows, or has a row that is not two
                lengths.
        """
        prompts, outputs = array("q"), array("q")
        with open_text(path) as lines:
            rows = TableRows(path, lines, *PAIR_COLUMNS)
            for prompt, output in rows:
                prompts.append(rows.tokens(prompt))
                outputs.append(rows.tokens(output))
        if not prompts:
            raise InvalidRequest(f"{path} has no rows. Give a file with one pair of lengths per row.")
        return cls(prompts, outputs)

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Draws the prompt and answer lengths of one request."""
        at = rng.randrange(len(self.prompt_tokens))
        return self.prompt_tokens[at], self.output_tokens[at]

"""Rotary settings of a checkpoint: base, scaling of the frequencies, and the share of each head that is rotated."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from maitred.core.errors import ConfigInvalid

_SUPPORTED = "default, linear, dynamic, llama3, yarn, longrope"
_LONGROPE_NAMES = ("longrope", "su")
"""Names of one scaling; older files of Phi-3 say `su`."""


class RotaryConfig(Struct, frozen=True):
    """Rotary embedding (Su et al., "RoFormer", 2021) with the scaling of its frequencies.

    - `linear` divides every frequency by `factor`.
    - `llama3` divides the low ones only, blending between the two wavelengths that `low_frequency_factor` and
      `high_frequency_factor` mark off (Llama 3.1's rule).
    - `yarn` divides the low ones, blending between the pairs that turn `slow_turns` and `fast_turns` times within the
      original context (Peng et al., 2023).
    - `longrope` divides each frequency by a factor of its own (Ding et al., 2024).
    """

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_tokens: int = 8192
    share: float = 1.0
    """Leading share of each head that is rotated; the rest is left as it is."""
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    whole_pairs: bool = True
    """Whether the ends of the blend are rounded to whole pairs (YaRN)."""
    amplitude: float = 1.0
    """Factor of the rotated numbers, which makes attention over long contexts sharper."""
    short_factors: tuple[float, ...] = ()
    """Divisors of the frequencies for a context no longer than the original one (longrope)."""
    long_factors: tuple[float, ...] = ()
    """Divisors of the frequencies for a longer context (longrope)."""

    def rotated_numbers(self, head_dim: int) -> int:
        """Returns how many numbers of a head are rotated."""
        return int(head_dim * self.share)


def parse_rotary(rope: Mapping[str, Any], fields: Mapping[str, Any], default_theta: float = 10_000.0) -> RotaryConfig:
    """Parses one set of rotary settings.

    Args:
        rope: The settings: ``rope_parameters`` (new) or ``rope_scaling`` (old).
        fields: The whole configuration, which has the rest.
        default_theta: Base where none is given.

    Raises:
        ConfigInvalid: The scaling is not supported.
    """
    theta = float(rope.get("rope_theta") or fields.get("rope_theta") or default_theta)
    share = float(rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    context_tokens = int(fields["max_position_embeddings"])
    given = rope.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
    original = int(given or context_tokens)
    # Dynamic scaling begins beyond the longest context, which is never served.
    if kind in ("default", "dynamic"):
        return RotaryConfig(theta=theta, share=share)
    if kind == "linear":
        return RotaryConfig(theta=theta, scaling="linear", factor=float(rope["factor"]), share=share)
    if kind == "llama3":
        return RotaryConfig(
            theta=theta,
            scaling="llama3",
            factor=float(rope["factor"]),
            low_frequency_factor=float(rope["low_freq_factor"]),
            high_frequency_factor=float(rope["high_freq_factor"]),
            original_context_tokens=int(rope["original_max_position_embeddings"]),
            share=share,
        )
    if kind == "yarn" and "long_factor" not in rope:
        factor = float(rope.get("factor") or context_tokens / original)
        return RotaryConfig(
            theta=theta,
            scaling="yarn",
            factor=factor,
            original_context_tokens=original,
            share=share,
            fast_turns=float(rope.get("beta_fast") or 32.0),
            slow_turns=float(rope.get("beta_slow") or 1.0),
            whole_pairs=bool(rope.get("truncate", True)),
            amplitude=_yarn_amplitude(rope, factor),
        )
    if kind in _LONGROPE_NAMES or kind == "yarn":
        factor = float(rope.get("factor") or context_tokens / original)
        amplitude = rope.get("attention_factor")
        if amplitude is None:
            amplitude = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
        return RotaryConfig(
            theta=theta,
            scaling="longrope",
            factor=factor,
            original_context_tokens=original,
            share=share,
            amplitude=float(amplitude),
            short_factors=tuple(map(float, rope["short_factor"])),
            long_factors=tuple(map(float, rope["long_factor"])),
        )
    raise ConfigInvalid(
        f"The rotary scaling {kind!r} is not supported. Supported: {_SUPPORTED}. Where the checkpoint runs "
        "unscaled within its original context, remove rope_scaling from config.json."
    )


def check_rotary(rotary: RotaryConfig, head_dim: int) -> None:
    """Raises ConfigInvalid if these settings do not fit heads of this size."""
    rotated = rotary.rotated_numbers(head_dim)
    if not 0 < rotated <= head_dim or rotated % 2 or head_dim % 2:
        raise ConfigInvalid(
            f"partial_rotary_factor {rotary.share:g} rotates {rotated} of {head_dim} numbers of a head; an even number "
            "is needed, and one at least. Is config.json that of this checkpoint?"
        )
    for name, factors in (("short_factor", rotary.short_factors), ("long_factor", rotary.long_factors)):
        if rotary.scaling == "longrope" and len(factors) != rotated // 2:
            raise ConfigInvalid(
                f"{name} of rope_scaling has {len(factors)} numbers, but {rotated // 2} pairs of each head are "
                "rotated. Is config.json that of this checkpoint?"
            )


def _yarn_amplitude(rope: Mapping[str, Any], factor: float) -> float:
    """Returns YaRN's factor of the rotated numbers: as given, or the rule of its authors."""

    def rule(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    scale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    return rule(float(scale)) / rule(float(of_all)) if scale and of_all else rule(1.0)

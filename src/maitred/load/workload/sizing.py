"""Scaling of the turns of a workload, so that a trace of long prompts fits a small model."""

import math
from dataclasses import dataclass

import msgspec

from maitred.load.spec import ShapeSpec
from maitred.load.workload.session import SessionTurn


@dataclass(frozen=True, slots=True)
class LengthScaling:
    """Scaling that is applied to every length.

    Attributes:
        scale: Factor on all lengths.
        max_prompt_tokens: Largest prompt length; longer prompts are cut at their end.
        max_output_tokens: Largest requested length of an answer.
        own_block_tokens: Length of a block before the scaling.
    """

    scale: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    own_block_tokens: int = 16

    @classmethod
    def of(cls, shape: ShapeSpec, own_block_tokens: int = 16) -> "LengthScaling":
        """Returns the scaling that a shape asks for."""
        return cls(shape.scale, shape.max_prompt_tokens, shape.max_output_tokens, own_block_tokens)

    @property
    def block_tokens(self) -> int:
        """Length of a block after the scaling."""
        return self.tokens(self.own_block_tokens)

    def tokens(self, own_tokens: float) -> int:
        """Scales a length; the result is at least 1."""
        return max(1, round(own_tokens * self.scale))

    def turn(self, own: SessionTurn) -> SessionTurn:
        """Scales a turn; a prompt of blocks keeps as many blocks as its new length needs.

        Blocks have a whole number of tokens. So their lengths are scaled by the factor of the block length, which
        differs a little from `scale` for small blocks.
        """
        output_tokens = _clip(self.tokens(own.output_tokens), self.max_output_tokens)
        if not own.blocks:
            prompt_tokens = _clip(self.tokens(own.prompt_tokens), self.max_prompt_tokens)
            return msgspec.structs.replace(own, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        most_tokens = len(own.blocks) * self.block_tokens
        own_tokens = min(own.prompt_tokens, len(own.blocks) * self.own_block_tokens)
        scaled_tokens = max(1, round(own_tokens * self.block_tokens / self.own_block_tokens))
        prompt_tokens = _clip(min(scaled_tokens, most_tokens), self.max_prompt_tokens)
        blocks = own.blocks[: math.ceil(prompt_tokens / self.block_tokens)]
        return msgspec.structs.replace(own, prompt_tokens=prompt_tokens, output_tokens=output_tokens, blocks=blocks)

    def __str__(self) -> str:
        words = [f"lengths × {self.scale:g}"] if self.scale != 1 else []
        if self.max_prompt_tokens is not None:
            words.append(f"prompts up to {self.max_prompt_tokens} tokens")
        if self.max_output_tokens is not None:
            words.append(f"answers up to {self.max_output_tokens} tokens")
        return ", ".join(words)


def _clip(tokens: int, most: int | None) -> int:
    return tokens if most is None else min(tokens, most)

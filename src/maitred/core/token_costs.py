"""What a request costs the replicas, in one number: *service*.

A token of the prompt, one that was found in the cache, and one that was generated cost very different amounts of work.
Fair shares, queues and predictions count their weighted sum. The weights are those of Sheng et al., OSDI'24 (VTC): an
output token counts twice a prompt token, because it takes a step of its own.
"""

import msgspec


class ServiceWeights(msgspec.Struct, frozen=True, array_like=True):
    """Service per token."""

    prompt: float = 1.0
    """That had to be computed."""
    cached: float = 0.1
    output: float = 2.0

    def of(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """The service of so many tokens; `prompt_tokens` includes the cached ones."""
        return self.prompt * (prompt_tokens - cached_tokens) + self.cached * cached_tokens + self.output * output_tokens

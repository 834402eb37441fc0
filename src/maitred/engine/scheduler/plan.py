"""Plan of one step, which the scheduler passes to the model runner."""

from dataclasses import dataclass, field

from msgspec import Struct

from maitred.core.request import PromptLogprobs
from maitred.engine.kv.swap import BlockCopy
from maitred.engine.scheduler.sequence import Sequence

_NO_ROWS = range(0)


class Chunk(Struct, gc=False):
    """Chunk of a sequence's tokens to compute: positions ``start … start + length - 1``.

    A chunk is made for every sequence in every step, so it is a struct. A struct is made in a third of the time of a
    dataclass, and the garbage collector does not track it.
    """

    sequence: Sequence
    start: int
    length: int
    drafts: tuple[int, ...] = ()
    """Draft tokens (see `engine.speculate`), which are computed behind a chunk that samples. The KV of accepted drafts
    is kept; rejected drafts are discarded."""
    draws: tuple[int, ...] = (0,)
    """Number of drafts before each sampled token, forced tokens included (`SpeculativeGrammarState`)."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of prompt tokens, if the request wants them; the runner adds them when it has computed the
    chunk."""

    @property
    def end(self) -> int:
        """Number of the sequence's tokens that are computed after the step, without its drafts."""
        return self.start + self.length

    @property
    def scored_rows(self) -> range:
        """Rows of the chunk whose logits give the log-probability of the prompt token behind each."""
        scored = self.sequence.scored
        if scored is None:
            return _NO_ROWS
        last = self.sequence.prompt_tokens - 1
        return range(max(0, scored - self.start), min(self.length, last - self.start))

    @property
    def samples(self) -> bool:
        """Whether the chunk contains the sequence's newest token, so that the next one can be sampled."""
        return self.start + self.length == len(self.sequence.tokens)


@dataclass(slots=True)
class StepPlan:
    """Plan of one step: the chunks to compute, and the sequences that were preempted or expired.

    `decodes` are the chunks of decoding sequences. They have one token each, or several where uncomputed tokens were
    appended. `prefills` are the chunks of prompts, and of tokens that are recomputed after a preemption.

    All KV of a step is written layer by layer before it is read, so a chunk may rely on blocks that another chunk of
    the same plan fills. This is how requests that arrive together share their common prefix.
    """

    decodes: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences that were preempted while this plan was made; they wait again."""
    moves: list[BlockCopy] = field(default_factory=list)
    """Block copies to and from the host's memory, in this order, before the step is computed."""
    window_moves: list[BlockCopy] = field(default_factory=list)
    """As `moves`, of the blocks of layers with a window."""
    expired: list[Sequence] = field(default_factory=list)
    """Sequences without blocks that this plan ended: their deadlines have passed or cannot be met."""

    @property
    def chunks(self) -> list[Chunk]:
        """Chunks of decodes, then of prefills."""
        return self.decodes + self.prefills

    @property
    def sampling(self) -> list[Chunk]:
        """The chunks that reach the newest token of their sequences."""
        return [chunk for chunk in self.chunks if chunk.samples]

    @property
    def tokens(self) -> int:
        """Tokens computed in the step; never more than the step budget."""
        return sum([chunk.length + len(chunk.drafts) for chunk in self.decodes + self.prefills])

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)

"""Plan of one step, as the scheduler hands it to the model runner."""

from dataclasses import dataclass, field

from msgspec import Struct

from maitred.engine.kv.swap import BlockCopy
from maitred.engine.scheduler.sequence import Sequence


class Chunk(Struct, gc=False):
    """A run of one sequence's tokens to compute: positions ``start … start + length - 1``.

    Made for every sequence in every step, which is why it is a struct: made in a third of a dataclass's time, and
    nothing that the garbage collector has to look at.
    """

    sequence: Sequence
    start: int
    length: int
    drafts: tuple[int, ...] = ()
    """Guesses at the tokens that will follow (see `engine.speculate`), computed behind a chunk that samples. Those that
    are then sampled in their places are computed already; of the others nothing is left."""
    draws: tuple[int, ...] = (0,)
    """How many of the drafts stand before each token that is sampled; some may be of those that are not (see
    `engine.grammar.supposition`)."""

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed after the step, whatever becomes of its drafts."""
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the newest token, so that the next one can be sampled."""
        return self.start + self.length == len(self.sequence.tokens)


@dataclass(slots=True)
class StepPlan:
    """Plan of one step: the chunks to compute, and whose blocks were taken.

    `decodes` are of answers under way, one token each, or several where tokens were appended that no step has computed.
    `prefills` are of prompts, and of what is computed again after a preemption.

    All KV of a step is written layer by layer before it is read, so a chunk may rely on blocks that another chunk of
    the same plan fills. This is how requests that arrive together share their common prefix.
    """

    decodes: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    """Lost their blocks while this plan was made; they wait again."""
    moves: list[BlockCopy] = field(default_factory=list)
    """Blocks to be copied to the host's memory and back, in this order, before anything is computed."""
    expired: list[Sequence] = field(default_factory=list)
    """Ended while this plan was made, because their deadline is over or cannot be met; they hold nothing any more."""

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

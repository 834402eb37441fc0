"""Sessions of turns, of which a workload is made.

A single question is a session with one turn; a conversation has several, each asked some time after the answer to the
one before. Everything random has been drawn already, so the same seed plays the same users.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec


class SessionTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One question and the length of its answer.

    Attributes:
        prompt_tokens: Of the user's message alone when `blocks` is empty (the conversation so far comes on top); of the
            whole prompt otherwise.
        output_tokens: Length of the answer to ask for (``max_tokens``, and no end before it where the server allows).
        think_s: Pause between the end of the answer before and this question. Ignored for the first turn.
        blocks: Ids of the prompt's blocks, in order, from a trace. The same id is the same text wherever it appears, so
            what the trace shared is shared again. With blocks the prompt is complete: no history is added.
    """

    prompt_tokens: int
    output_tokens: int
    think_s: float = 0.0
    blocks: tuple[int, ...] = ()


class LoadSession(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of one user, one after the other.

    Attributes:
        id: Counts up from 0.
        turns: At least one.
        tenant: Who asks; a name of the spec's tenants.
        at_s: When the first turn is due, since the start of the run; None: as soon as a user is free (closed loop).
        prefix: Number of the shared prefix that opens every prompt of this session, such as a system prompt; None:
            none.
        prefix_tokens: Its length.
    """

    id: int
    turns: tuple[SessionTurn, ...]
    tenant: str = "default"
    at_s: float | None = None
    prefix: int | None = None
    prefix_tokens: int = 0


@dataclass(frozen=True)
class Workload:
    """Sessions in the order in which they begin.

    Attributes:
        sessions: Finite or endless; for an open loop `at_s` never falls.
        block_tokens: Tokens that one id of `SessionTurn.blocks` stands for.
        description: One line for reports, such as ``mooncake, speed 0.1, lengths × 1/8``.
    """

    sessions: Iterator[LoadSession]
    block_tokens: int = 16
    description: str = ""

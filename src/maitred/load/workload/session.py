"""Sessions of turns, which make up a workload.

A single question is a session with one turn; a conversation has several, each asked some time after the answer to the
one before. Everything random is already drawn, so the same seed plays the same users.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec


class SessionTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Turn of a session: one question and the length of its answer.

    Attributes:
        prompt_tokens: Length of the user's message alone if `blocks` is empty (the conversation so far is added);
            otherwise length of the whole prompt.
        output_tokens: Requested length of the answer (``max_tokens``, and no earlier end if the server supports that).
        think_s: Pause between the end of the answer before and this question. Ignored for the first turn.
        blocks: Ids of the prompt's blocks, in order, from a trace. The same id gives the same text everywhere, so what
            was shared in the trace is shared again. With blocks the prompt is complete: no history is added.
    """

    prompt_tokens: int
    output_tokens: int
    think_s: float = 0.0
    blocks: tuple[int, ...] = ()


class LoadSession(msgspec.Struct, frozen=True, kw_only=True):
    """Session of one user: its turns, one after the other.

    Attributes:
        id: Number of the session, from 0.
        turns: Turns of the session, at least one.
        tenant: Tenant of the session; a name of the spec's tenants.
        at_s: Due time of the first turn, in seconds since the start of the run; None: as soon as a user is free (closed
            loop).
        prefix: Number of the shared prefix that begins every prompt of this session, such as a system prompt; None:
            there is none.
        prefix_tokens: Length of the prefix.
    """

    id: int
    turns: tuple[SessionTurn, ...]
    tenant: str = "default"
    at_s: float | None = None
    prefix: int | None = None
    prefix_tokens: int = 0


@dataclass(frozen=True)
class Workload:
    """Workload: sessions in the order in which they begin.

    Attributes:
        sessions: Sessions, finite or endless; in an open loop they are in the order of `at_s`.
        block_tokens: Tokens that one id of `SessionTurn.blocks` stands for.
        description: Description in one line for reports, such as ``mooncake, speed 0.1, lengths × 1/8``.
    """

    sessions: Iterator[LoadSession]
    block_tokens: int = 16
    description: str = ""

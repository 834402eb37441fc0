"""Engine whose answer is a digest of the conversation in the prompt, so that each answer shows what was asked.

It speaks the real protocol on a real socket (`maitred.testing.scripted_engine`) and runs in the process of the
benchmark, which therefore knows what the engine has counted for each request.
"""

import hashlib
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from maitred.config.tree import BUNDLED_MODEL
from maitred.core.request import EngineRequest
from maitred.testing.script import SCRIPTED_CARD, ScriptedAnswer
from maitred.testing.scripted_engine import ScriptedEngine
from maitred.text.tokenizer import Tokenizer
from maitred.wire.address import Address

_SAID = re.compile(r"\[\d+/\d+\]|<[0-9a-f]{8}>")


@dataclass(frozen=True)
class EngineCount:
    """Tokens that the engine counts for one request whose answer comes to its end."""

    prompt_tokens: int
    output_tokens: int


class DigestEngine(ScriptedEngine):
    """Engine that answers with a digest of all turns of a prompt.

    Args:
        address: Address to listen at.
        step_s: Pause between two steps.

    Attributes:
        counts: Id of an entry of the ledger -> what the engine counts for it, if it comes to its end.
    """

    def __init__(self, address: Address, *, step_s: float) -> None:
        self._tokenizer = Tokenizer.load(BUNDLED_MODEL)
        self.counts: dict[str, EngineCount] = {}
        card = replace(SCRIPTED_CARD, vocab_size=self._tokenizer.vocab_size)
        super().__init__(self._digest, address=address, card=card, step_s=step_s)

    def _digest(self, request: EngineRequest) -> ScriptedAnswer:
        self.submitted.clear()  # prompts of thousands of requests
        said = _SAID.findall(self._tokenizer.decode(request.prompt))
        tokens = [*self._tokenizer.encode(digest_of(said), add_special_tokens=False), *self.card.eos_token_ids]
        output_tokens = min(len(tokens), request.sampling.max_tokens)
        self.counts[request.id.partition("/")[0].rpartition("-")[0]] = EngineCount(len(request.prompt), output_tokens)
        return ScriptedAnswer(tokens=tokens)


def question(conversation: int, turn: int) -> str:
    """Returns what a user says in a turn."""
    return f"[{conversation}/{turn}]"


def digest_of(said: Iterable[str]) -> str:
    """Returns the answer to a conversation: a digest of its questions and answers in their order."""
    return f"<{hashlib.sha256(' '.join(said).encode()).hexdigest()[:8]}>"


@asynccontextmanager
async def digest_engine(address: Address, *, step_s: float = 0.004) -> AsyncIterator[DigestEngine]:
    """Runs the engine until the context ends."""
    engine = DigestEngine(address, step_s=step_s)
    async with engine:
        yield engine

"""Charges of the running sequences: real tokens, as they are computed, and none of them twice.

A token of a prompt is charged when it is computed for the first time, or found in the cache instead; a token of the
answer when it is sampled. Nothing is charged ahead, so a sequence that is aborted has nothing to get back; and what is
computed again after a preemption was charged before. So the charges of a sequence are, whatever happened to it, the
service of the tokens that are billed for it.
"""

from collections.abc import Iterable
from typing import Any

from maitred.core.flow import Flow, ServiceWeights
from maitred.engine.scheduler.sequence import FlowCharge, Sequence
from maitred.fairness.fair_queue import FairQueue


class FlowCharges:
    """Charges flows for what their sequences get.

    Sequences that decode get a token in every step, as a rule. The line is told when that begins and when it ends, and
    charges for all of them in one go: at a hundred running sequences the walks through the tree of tenants would be a
    good part of the scheduler's time.

    Args:
        fair_queue: What keeps the counters.
        weights: Service per token.
    """

    def __init__(self, fair_queue: FairQueue[Any], weights: ServiceWeights) -> None:
        self.weights = weights
        self._line = fair_queue
        self._accounts: dict[Flow, FlowCharge] = {}

    def open(self, flow: Flow) -> FlowCharge:
        """The account of a flow, for one more sequence."""
        account = self._accounts.get(flow)
        if account is None:
            account = self._accounts[flow] = FlowCharge(flow)
        account.sequences += 1
        return account

    def close(self, account: FlowCharge) -> None:
        """A sequence has ended."""
        account.sequences -= 1
        if account.sequences == 0:
            del self._accounts[account.flow]

    def charge_prompt(self, sequence: Sequence, upto: int, *, cached: bool = False) -> int:
        """Charges what of the prompt is had for the first time, up to a position.

        Returns:
            How many tokens that is.
        """
        limit = sequence.prompt_tokens
        before = sequence.once_computed
        tokens = (upto if upto < limit else limit) - before
        if tokens <= 0:
            return 0
        weights = self.weights
        self._line.charge(sequence.account.flow, tokens * (weights.cached if cached else weights.prompt))
        return tokens

    def begin_decoding(self, sequence: Sequence) -> None:
        """From now on a sequence gets a token of its answer in every step."""
        self._line.stream(sequence.account.flow, self.weights.output)

    def end_decoding(self, sequence: Sequence) -> None:
        """Notes that a sequence does not decode any more."""
        self._line.stream(sequence.account.flow, -self.weights.output)

    def charge_outputs(self, further: Iterable[tuple[Sequence, int]], left_out: list[Sequence]) -> None:
        """Charges a token of the answer of each sequence that decodes, and others by the piece.

        Args:
            further: Tokens beyond that one, or of sequences that have not decoded before.
            left_out: Decode, and got none in this step.
        """
        for sequence in left_out:
            self.end_decoding(sequence)
        self._line.tick()
        for sequence in left_out:
            self.begin_decoding(sequence)
        for sequence, tokens in further:
            self._line.charge(sequence.account.flow, tokens * self.weights.output)

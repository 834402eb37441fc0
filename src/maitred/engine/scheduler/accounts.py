"""Service charges of the running sequences: each token is charged once, when it is computed.

A prompt token is charged when it is first computed or found in the prefix cache. An output token is charged when it is
sampled. There are no charges in advance, so an aborted sequence needs no refund. Tokens that are recomputed after a
preemption are not charged again. So the charges of a sequence always equal the service of its billed tokens.
"""

from collections.abc import Iterable
from typing import Any

from maitred.core.flow import Flow, ServiceWeights
from maitred.engine.scheduler.sequence import FlowCharge, Sequence
from maitred.fairness.fair_queue import FairQueue


class FlowCharges:
    """Accounts that charge flows for the tokens of their sequences.

    A decoding sequence usually gets one token in every step. The line is told when that begins and when it ends, and
    charges for all of them in one go: at a hundred running sequences the walks through the tree of tenants would be a
    good part of the scheduler's time.

    Args:
        fair_queue: Queue that keeps the service counters.
        weights: Service per token.
    """

    def __init__(self, fair_queue: FairQueue[Any], weights: ServiceWeights) -> None:
        self.weights = weights
        self._line = fair_queue
        self._accounts: dict[Flow, FlowCharge] = {}

    def open(self, flow: Flow) -> FlowCharge:
        """Returns the account of a flow, and counts one more sequence on it."""
        account = self._accounts.get(flow)
        if account is None:
            account = self._accounts[flow] = FlowCharge(flow)
        account.sequences += 1
        return account

    def close(self, account: FlowCharge) -> None:
        """Removes an ended sequence from its flow's account."""
        account.sequences -= 1
        if account.sequences == 0:
            del self._accounts[account.flow]

    def charge_prompt(self, sequence: Sequence, upto: int, *, cached: bool = False) -> int:
        """Charges the prompt tokens up to a position that were not charged before.

        Returns:
            Number of newly charged tokens.
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
        """Notes that a sequence decodes from now on, so it gets a token in every step."""
        self._line.stream(sequence.account.flow, self.weights.output)

    def end_decoding(self, sequence: Sequence) -> None:
        """Notes that a sequence no longer decodes."""
        self._line.stream(sequence.account.flow, -self.weights.output)

    def charge_outputs(self, further: Iterable[tuple[Sequence, int]], left_out: list[Sequence]) -> None:
        """Charges one output token for each decoding sequence, and further tokens individually.

        Args:
            further: Tokens beyond the first of a sequence, and tokens of sequences that did not decode before.
            left_out: Decoding sequences that got no token in this step.
        """
        for sequence in left_out:
            self.end_decoding(sequence)
        self._line.tick()
        for sequence in left_out:
            self.begin_decoding(sequence)
        for sequence, tokens in further:
            self._line.charge(sequence.account.flow, tokens * self.weights.output)

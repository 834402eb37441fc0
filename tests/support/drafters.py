"""Drafters and judges of drafts for tests."""

from maitred.engine.speculate.guess import DraftTokens


class Rumour:
    """Guesses of which most are right, for the answers that it has heard."""

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size
        self.answers = {}

    def draft(self, sequence, most):
        answer = self.answers.get((sequence.request.id, sequence.index), ())
        ahead = answer[sequence.output_tokens :][:most]
        if not ahead:
            return None
        wrong = (sequence.key + len(sequence.tokens)) % 5
        return DraftTokens(
            0, len(ahead), tuple((token + (i == wrong)) % self.vocab_size for i, token in enumerate(ahead))
        )

    def forget(self, sequence):
        pass


class Always:
    """Drafts always pay."""

    def may_pay(self, work, most, times):
        return True

    def rows(self, work, gains, times, writing_s=None):
        return len(gains)

    def on_step_time(self, work, seconds, times):
        pass

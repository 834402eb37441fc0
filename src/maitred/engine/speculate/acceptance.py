"""Acceptance rates of draft tokens, learnt per sequence and per kind of draft."""

from maitred.engine.speculate.guess import WRITTEN

_SHARED_FADE = 0.98
_OWN_FADE = 0.8
"""Fading factor per draft. A text that stops copying is detected after a few drafts."""
_CAUTION = 0.75
"""What holds of other sequences need not hold of a new one: its first guess is put to the test in few rows..."""
_WRITTEN_RIGHT, _WRITTEN_TRIALS = 0.8, 10.0
"""...but who has chosen a draft model expects it to be right. The rate is high, because drafts that are never written
cannot prove to be right."""
_PRIOR_TRIALS = 2.0
"""Weight in trials of the shared rate with which a sequence begins; it fades like other trials."""


class Rate:
    """Rate of accepted tokens among tested tokens; older tokens fade.

    Args:
        fade: Factor that is applied to earlier counts with each draft.
        right: Initial number of accepted tokens.
        trials: Initial number of tested tokens; more than 0.
    """

    __slots__ = ("_fade", "right", "trials")

    def __init__(self, fade: float, right: float, trials: float) -> None:
        self._fade = fade
        self.right = right
        self.trials = trials

    def add(self, right: int, trials: int) -> None:
        """Adds the result of one more draft."""
        self.right = self._fade * self.right + right
        self.trials = self._fade * self.trials + trials


class Acceptance:
    """Estimator of the probability that a draft token is right if all before it were right."""

    def __init__(self) -> None:
        self._shared: dict[int, Rate] = {}
        self._own: dict[int, dict[int, Rate]] = {}
        """Sequence key -> kind -> rate."""

    def of(self, sequence: int, kind: int) -> float:
        """Returns the probability that a draft token of a sequence is accepted.

        Args:
            sequence: Its key.
            kind: Kind of the draft tokens, see `DraftTokens`.
        """
        shared = self._shared_rate(kind)
        own = self._own.get(sequence, {}).get(kind)
        if own is not None:
            return own.right / own.trials
        return (1.0 if kind == WRITTEN else _CAUTION) * shared.right / shared.trials

    def record(self, sequence: int, kind: int, guessed: tuple[int, ...], came: list[int]) -> None:
        """Compares a draft with the tokens that came in its place.

        Tokens behind the first wrong token, or behind the end of either sequence of tokens, do not count.
        """
        right = 0
        for guess, token in zip(guessed, came, strict=False):
            if guess != token:
                break
            right += 1
        trials = min(right + 1, len(guessed), len(came))
        if trials:
            own = self._own.setdefault(sequence, {})
            if kind not in own:
                prior = _WRITTEN_TRIALS if kind == WRITTEN else _PRIOR_TRIALS
                own[kind] = Rate(_OWN_FADE, prior * self.of(sequence, kind), prior)
            own[kind].add(right, trials)
            self._shared_rate(kind).add(right, trials)

    def forget(self, sequence: int) -> None:
        """Forgets a sequence; an unknown key is ignored."""
        self._own.pop(sequence, None)

    def _shared_rate(self, kind: int) -> Rate:
        rate = self._shared.get(kind)
        if rate is None:
            right, trials = (_WRITTEN_RIGHT * _WRITTEN_TRIALS, _WRITTEN_TRIALS) if kind == WRITTEN else (1.0, 2.0)
            rate = self._shared[kind] = Rate(_SHARED_FADE, right, trials)
        return rate

"""Whether an engine that somebody else has started runs the model that it should."""

from maitred.core.errors import ReplicaUnavailable
from maitred.core.fingerprint import ModelFingerprint
from maitred.core.replica import ModelCard


class FingerprintCheck:
    """What all engines of one model have in common: answers begin at one and go on at another.

    What the gateway's own files do not say (it needs no weights, and not the type to compute in), the first engine says
    for those that come after it.

    Args:
        digest: Of the gateway's own files.
    """

    def __init__(self, digest: ModelFingerprint) -> None:
        self._digest = digest
        self._dtype = ""

    def check(self, card: ModelCard) -> None:
        """Remembers what it adds.

        Raises:
            ReplicaUnavailable: An engine with this card may not answer in the place of the others; the reason why.
        """
        if differing := self._digest.differs_in(card.digest):
            raise ReplicaUnavailable(
                f"It runs another model, {card.name}: its {' and '.join(differing)} differ. Start it with the files "
                "that this gateway and its other engines have; or start the gateway again, if all of them have changed."
            )
        if self._dtype and card.dtype != self._dtype:
            raise ReplicaUnavailable(
                f"It computes in {card.dtype} and the other engines in {self._dtype}, so its answers are not theirs. "
                "Start all of them with the same --dtype."
            )
        self._digest = self._digest.completed_by(card.digest)
        self._dtype = card.dtype

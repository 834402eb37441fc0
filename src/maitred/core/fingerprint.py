"""Whether two ends have the same model, without sending it."""

import msgspec


class ModelFingerprint(msgspec.Struct, frozen=True, array_like=True):
    """Short hashes of a model's parts; empty for a part that is not there, or of which nothing is said."""

    shape: str = ""
    """Of what ``config.json`` says that a computation depends on."""
    tokenizer: str = ""
    weights: str = ""

    def differs_in(self, other: "ModelFingerprint") -> list[str]:
        """The parts that are known of both and are not the same, in words."""
        return [
            name
            for name, mine, theirs in (
                ("config.json", self.shape, other.shape),
                ("tokenizer.json", self.tokenizer, other.tokenizer),
                ("weights", self.weights, other.weights),
            )
            if mine and theirs and mine != theirs
        ]

    def completed_by(self, other: "ModelFingerprint") -> "ModelFingerprint":
        """The same, with what only the other one knows."""
        return ModelFingerprint(
            self.shape or other.shape, self.tokenizer or other.tokenizer, self.weights or other.weights
        )

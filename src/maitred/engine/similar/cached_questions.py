"""Cached questions of an encoder's process: search among them, and the verifiers that judge what is found."""

import logging
from collections import OrderedDict
from collections.abc import Generator, Sequence

from maitred.core.errors import ConfigInvalid
from maitred.core.request import LabelledPair, SimilarQuestion, SimilarQuestions, SimilarSearch
from maitred.engine.similar.index import MEAN_TOKENS, SimilarIndex
from maitred.engine.similar.question import EncodedQuestion
from maitred.engine.similar.question_reader import QuestionReader
from maitred.engine.similar.training import train_in_units
from maitred.engine.similar.verifier import Verifier
from maitred.wire.frames import UpdateSimilar

RECENT_QUESTIONS = 2_000
"""Questions that were searched lately: their answers are being computed, and then they may be kept."""
MOST_CHARACTERS = 2_000
MOST_TOKENS = 256
"""Longer questions find nothing and are not kept. The gateway asks for none; memory does not depend on it."""

MOST_VERIFIERS = 1_000
"""Verifiers that are kept, one for each scope. A gateway sends one again that a search has lacked."""

logger = logging.getLogger("maitred.engine")


class CachedQuestions:
    """Cached questions, and those that were searched lately, of all gateways of an encoder.

    Args:
        reader: Reads questions.
        encoder: Version of the encoder's vectors, for which verifiers are trained (`ModelCard.encoder_version`).
        max_entries: Most cached questions.

    Attributes:
        index: The cached questions.
    """

    def __init__(self, reader: QuestionReader, *, encoder: str, max_entries: int) -> None:
        self.index = SimilarIndex(max_entries)
        self._reader = reader
        self._encoder = encoder
        self._recent = RecentQuestions(RECENT_QUESTIONS)
        self._verifiers: OrderedDict[str, Verifier] = OrderedDict()
        """Scope -> its verifier; the one that was used longest ago goes first."""

    def answer(self, texts: Sequence[tuple[Sequence[int], SimilarSearch | None]]) -> list[bytes | SimilarQuestions]:
        """Computes the vectors of texts in one batch, and searches where a search is with the text.

        Args:
            texts: Token ids of each text, and its search.

        Returns:
            For each text its vector in the form of `TokenDelta.embedding`, or the result of its search.
        """
        vectors, rows = self._reader.encode([tokens for tokens, _ in texts])
        return [
            vector.astype("<f4").tobytes()
            if search is None
            else self._search(search, self._reader.question(search.question, tokens, vector, row))
            for (tokens, search), vector, row in zip(texts, vectors, rows, strict=True)
        ]

    def update(self, update: UpdateSimilar) -> None:
        """Adds and removes cached questions, notes which were served, and changes verifiers."""
        for kept in update.kept:
            if (question := self._recent.get(kept.partition, kept.question)) is not None:
                self.index.add(kept.partition, kept.key, question)
        for key in update.removed:
            self.index.remove(key)
        for key in update.served:
            self.index.touch(key)
        for scope, weights in update.verifiers.items():
            self._load(scope, weights)

    def train(self, labels: Sequence[LabelledPair]) -> Generator[None, None, bytes]:
        """Prepares the training of a verifier, in units as of `train_in_units`.

        Raises:
            ValueError: The model's folder has no tokenizer.
        """
        try:
            _ = self._reader.tokenizer
        except ConfigInvalid as fault:
            raise ValueError(fault.message) from fault
        return train_in_units(labels, self._reader, self._encoder)

    def _search(self, search: SimilarSearch, question: EncodedQuestion) -> SimilarQuestions:
        verifier = self._verifiers.get(search.scope)
        version = "" if verifier is None else verifier.version
        if len(question.text) > MOST_CHARACTERS or len(question.token_ids) > MOST_TOKENS:
            return SimilarQuestions([], version)
        self._recent.add(search.partition, question)
        if verifier is not None:
            self._verifiers.move_to_end(search.scope)
        found = self.index.search(search.partition, question, count=search.count, least_cosine=search.least_cosine)
        pairs = [pair for _, pair in found]
        scores = [None] * len(pairs) if verifier is None or not pairs else verifier.score(pairs).tolist()
        return SimilarQuestions(
            [
                SimilarQuestion(
                    key=key,
                    question=pair.cached.text,
                    cosine=float(pair.asked.vector @ pair.cached.vector),
                    score=score,
                    surroundings=pair.surroundings,
                )
                for (key, pair), score in zip(found, scores, strict=True)
                if isinstance(key, bytes)
            ],
            version,
        )

    def _load(self, scope: str, weights: bytes) -> None:
        self._verifiers.pop(scope, None)
        if not weights:
            return
        try:
            self._verifiers[scope] = Verifier.load(weights, self._encoder)
        except ValueError as fault:
            logger.warning("the verifier of the scope %s is not used: %s", scope, fault)
        if len(self._verifiers) > MOST_VERIFIERS:
            self._verifiers.popitem(last=False)


class RecentQuestions:
    """Questions that were searched lately, by partition and text; the one that was searched longest ago goes first.

    Args:
        max_entries: Most questions; together they have at most `MEAN_TOKENS` times as many tokens.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._tokens = 0
        self._questions: OrderedDict[tuple[bytes, str], EncodedQuestion] = OrderedDict()

    def __len__(self) -> int:
        return len(self._questions)

    def add(self, partition: bytes, question: EncodedQuestion) -> None:
        """Adds a question that was searched in a partition."""
        before = self._questions.pop((partition, question.text), None)
        self._tokens += len(question.token_ids) - (0 if before is None else len(before.token_ids))
        self._questions[partition, question.text] = question
        while len(self._questions) > self._max_entries or self._tokens > MEAN_TOKENS * self._max_entries:
            _, gone = self._questions.popitem(last=False)
            self._tokens -= len(gone.token_ids)

    def get(self, partition: bytes, text: str) -> EncodedQuestion | None:
        """Returns a question; None: it was not searched lately."""
        return self._questions.get((partition, text))

"""Catalog of models: maps the name of a model to its replicas."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b

from msgspec.structs import replace

from maitred.core.errors import ReplicaUnavailable
from maitred.core.replica import HasModelCard, ModelCard
from maitred.core.request import ModelFingerprint
from maitred.core.text_replica import CHAT, ModelMode, TextReplica
from maitred.text.answer_format import AnswerFormat
from maitred.text.estimate import LearntBound, LearntRatio
from maitred.text.generation_defaults import GenerationDefaults
from maitred.text.tokenizer import Tokenizer

_MOST_FINGERPRINTS = 1024


class _CatalogModel:
    """Base of every model of the catalog: a name, and replicas that have its card."""

    def __init__(self, name: str, card_sources: Iterable[HasModelCard]) -> None:
        self.name = name
        self._card_sources = card_sources

    def is_ready(self) -> bool:
        """Returns whether a request could run now."""
        return any(map(_is_ready, self._card_sources))


class ServedModel(_CatalogModel):
    """Model of our own engines, under the name that requests use.

    Args:
        name: The name.
        replicas: The replicas that run it, which may come and go.
        tokenizer: The model's own tokenizer.
        answer_format: Format of the answers; None means the format that the chat template shows.
        defaults: Sampling settings for requests that do not set their own.
        coming_card: Returns the card of a replica that requests may wait for while none serves; None: they may not.
        stays_ready: Returns whether the model is ready while no replica serves.
    """

    def __init__(
        self,
        name: str,
        replicas: Iterable[HasModelCard],
        tokenizer: Tokenizer,
        answer_format: AnswerFormat | None = None,
        defaults: GenerationDefaults = GenerationDefaults(),  # noqa: B008 - frozen
        coming_card: Callable[[], ModelCard | None] = lambda: None,
        stays_ready: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(name, replicas)
        self.tokenizer = tokenizer
        self.defaults = defaults
        self._answer_format = answer_format
        self._coming_card = coming_card
        self._stays_ready = stays_ready
        self._cards: dict[HasModelCard, ModelCard] = {}
        """Last known card of each replica; without replicas, of those that were there last."""

    def is_ready(self) -> bool:
        """Returns whether a request could run now, or is as welcome though no replica serves."""
        return super().is_ready() or self._stays_ready()

    def card(self) -> ModelCard:
        """Returns the card of all replicas together: a request must fit each of them, and their capacities add up.

        A replica that restarts counts with its last known card.

        Raises:
            ReplicaUnavailable: No replica has been ready since the start, and requests may not wait for one.
        """
        failure: ReplicaUnavailable | None = None
        known, last = {}, self._cards
        for source in self._card_sources:
            try:
                known[source] = source.card()
            except ReplicaUnavailable as unavailable:
                if source in last:
                    known[source] = last[source]
                if failure is None or (unavailable.retry_after_s or 0.0) < (failure.retry_after_s or 0.0):
                    failure = unavailable
        if known:
            self._cards = known
        elif not last:
            if (coming := self._coming_card()) is not None:
                return coming
            raise failure or ReplicaUnavailable()
        cards = list(self._cards.values())
        if len(cards) == 1:
            return cards[0]
        return replace(
            cards[0],
            context_tokens=min(card.context_tokens for card in cards),
            max_choices=min(card.max_choices for card in cards),
            max_sequences=sum(card.max_sequences for card in cards),
            kv_capacity_tokens=sum(card.kv_capacity_tokens for card in cards),
            digest=cards[0].digest if len(set(map(_computation_of, cards))) == 1 else ModelFingerprint(),
        )

    def regions(self, untold: str | None) -> set[str | None]:
        """Returns the regions where its replicas are.

        Args:
            untold: Region of the replicas that have told none.
        """
        regions = set()
        for source in self._card_sources:
            try:
                card: ModelCard | None = source.card()
            except ReplicaUnavailable:
                card = self._cards.get(source)
            regions.add(untold if card is None or card.region is None else card.region)
        return regions or {untold}

    @cached_property
    def answer_identity(self) -> str:
        """Digest of everything here by which tokens become text, reasoning and calls.

        The engine's fingerprint of the tokenizer is not enough: its files can be exchanged, and the engine started
        again, while this process still has the former tokenizer.
        """
        template, answer_format = self.tokenizer.chat_template, self.answer_format
        sources = [] if template is None else [template.source, template.tool_source]
        parts = [self.tokenizer.digest, *sources, answer_format.calls or "", answer_format.reasoning or ""]
        return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

    @property
    def answer_format(self) -> AnswerFormat:
        """Format of the answers of the model, detected at first use if none was configured."""
        if self._answer_format is None:
            self._answer_format = AnswerFormat.of(self.tokenizer)
        return self._answer_format


class TextModel(_CatalogModel):
    """Model of upstream servers, which receive and return text.

    Args:
        name: The name that requests use.
        replicas: The upstreams; at least one.
        tokenizer: Tokenizer of the model, if it is installed here; None means that tokens are estimated.
        reprompts: Whether another server continues an interrupted stream from the text so far.
        continues_at_fallback: Whether a fallback model may continue it, too.
        mode: What its servers are asked for.

    Attributes:
        prompt_ratio: Tokens that its servers count for each one estimated in a prompt...
        output_ratio: ...and in an answer.
        least_ratio: Fewest tokens that its servers count for each one estimated in an answer...
        least_per_chunk: ...and for each chunk of a stream.
    """

    def __init__(
        self,
        name: str,
        replicas: Sequence[TextReplica],
        tokenizer: Tokenizer | None = None,
        *,
        reprompts: bool = False,
        continues_at_fallback: bool = False,
        mode: ModelMode = CHAT,
    ) -> None:
        super().__init__(name, replicas)
        self.replicas = replicas
        self.mode = mode
        self.tokenizer = tokenizer
        self.reprompts = reprompts
        self.continues_at_fallback = continues_at_fallback
        self.prompt_ratio = LearntRatio()
        self.output_ratio = LearntRatio()
        self.least_ratio = LearntBound()
        self.least_per_chunk = LearntBound()
        self._fingerprints: dict[str | None, str] = {}
        """Name of a model at its servers -> what they have said last that they run."""
        self._card: ModelCard | None = None
        """Last known card."""

    def card(self) -> ModelCard:
        """Returns the model's card from a replica, or the last known one.

        The last known card allows request checks while a replica restarts.

        Raises:
            ReplicaUnavailable: No replica has been ready since the start.
        """
        failure: ReplicaUnavailable | None = None
        for source in self._card_sources:
            try:
                self._card = source.card()
                break
            except ReplicaUnavailable as unavailable:
                failure = unavailable
        if self._card is None:
            raise failure or ReplicaUnavailable()
        return self._card

    def is_refusing(self) -> bool:
        """Returns whether all replicas refuse requests for want of room; see `TextReplica.is_refusing`."""
        return all(replica.is_refusing() for replica in self.replicas)

    def note_fingerprint(self, name: str | None, fingerprint: str) -> None:
        """Notes what a server says that it runs under a name."""
        if name not in self._fingerprints and len(self._fingerprints) >= _MOST_FINGERPRINTS:
            self._fingerprints.clear()  # clients can choose names
        self._fingerprints[name] = fingerprint

    def fingerprint(self, name: str | None) -> str:
        """Returns what a server has said last that it runs under a name; empty: nothing."""
        return self._fingerprints.get(name, "")

    def with_replicas(
        self,
        replicas: Sequence[TextReplica],
        tokenizer: Tokenizer | None,
        *,
        reprompts: bool,
        continues_at_fallback: bool,
        mode: ModelMode = CHAT,
    ) -> "TextModel":
        """Returns a copy of the model with other replicas, and with all that was learnt of the former ones."""
        model = TextModel(
            self.name, replicas, tokenizer, reprompts=reprompts, continues_at_fallback=continues_at_fallback, mode=mode
        )
        model.prompt_ratio, model.output_ratio, model._card = self.prompt_ratio, self.output_ratio, self._card
        model.least_ratio, model.least_per_chunk = self.least_ratio, self.least_per_chunk
        model._fingerprints = self._fingerprints
        return model


AnyModel = ServedModel | TextModel


class Catalog:
    """Catalog of all models that this gateway serves, by name."""

    def __init__(self, models: Iterable[AnyModel]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[AnyModel]:
        return iter(self._models.values())

    def __getitem__(self, name: str) -> AnyModel:
        return self._models[name]


def _computation_of(card: ModelCard) -> tuple[object, ...]:
    """Returns what has to be the same for two replicas to compute the same."""
    return card.digest, card.dtype, card.pooling


def _is_ready(source: HasModelCard) -> bool:
    try:
        source.card()
    except ReplicaUnavailable:
        return False
    return True

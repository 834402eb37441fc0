"""Encoder of questions: the gateway's embedding model, whose process searches among cached questions as well."""

from collections.abc import Sequence

from maitred.app.models.encoder import ServedEncoder
from maitred.core.clock import Clock
from maitred.core.errors import ReplicaLost
from maitred.core.flow import Flow
from maitred.core.ids import new_object_id
from maitred.core.replica import TokenStream
from maitred.core.request import (
    EngineRequest,
    LabelledPair,
    SamplingParams,
    SimilarQuestions,
    SimilarSearch,
    TokenDelta,
    VerifierTraining,
)
from maitred.dispatch.request import DispatchRequest
from maitred.wire.frames import UpdateSimilar

_SAMPLING = SamplingParams(max_tokens=0, seed=0)


class QuestionEncoder:
    """Encoder that finds similar questions and learns which of them have the same answer.

    Its searches wait in the queue of the encoder, beside embeddings, each in the flow of its caller.

    Args:
        encoder: The embedding model.
        clock: The clock.
    """

    def __init__(self, encoder: ServedEncoder, clock: Clock) -> None:
        self._encoder = encoder
        self._clock = clock

    @property
    def version(self) -> str:
        """Digest of the encoder, to which verifiers belong.

        Raises:
            ReplicaUnavailable: The encoder is down.
        """
        return self._encoder.model.card().encoder_version

    @property
    def epoch(self) -> int:
        """Number of the encoder's process, whose index begins empty.

        Raises:
            ReplicaUnavailable: The encoder is down.
        """
        return self._encoder.client.epoch

    def tokens_of(self, question: str) -> list[int] | None:
        """Returns the tokens of a question; None: they do not fit the encoder, so its vector would miss the rest.

        Raises:
            ReplicaUnavailable: The encoder is down.
        """
        tokens = self._encoder.model.tokenizer.encode_embedding_input(question)
        return tokens if len(tokens) <= self._encoder.model.card().context_tokens else None

    def may_read(self, regions: frozenset[str] | None) -> bool:
        """Whether the encoder may get the question of a request: it is at its gateway, or where the request may run.

        Args:
            regions: Regions in which the request may be computed; None: in all regions.
        """
        core = self._encoder.dispatcher.core
        return regions is None or all(
            state.region == core.region or state.region in regions for state in core.endpoint_states
        )

    def regions_of_label(self, regions: frozenset[str] | None) -> list[str] | None:
        """Returns the regions where questions may be read of which this encoder has compared the answers.

        These are the regions of their requests and that of this gateway, which has read them. None: everywhere.

        Args:
            regions: Regions in which their requests may be computed; None: in all regions.
        """
        return None if regions is None else sorted(regions | {self._encoder.dispatcher.core.region or ""})

    def may_learn_from(self, label: LabelledPair) -> bool:
        """Whether the encoder may get the questions of a label, which another gateway may have made."""
        states = self._encoder.dispatcher.core.endpoint_states
        return label.regions is None or all((state.region or "") in label.regions for state in states)

    async def search(
        self,
        search: SimilarSearch,
        tokens: list[int],
        flow: Flow,
        organisation: str,
        regions: frozenset[str] | None = None,
    ) -> SimilarQuestions:
        """Returns the cached questions that are similar to one.

        Args:
            search: What to search for.
            tokens: Tokens of the question.
            flow: Flow of its request.
            organisation: Organisation of the caller.
            regions: Regions beside that of the gateway where the question may be read; None: everywhere.

        Raises:
            MaitredError: The encoder is down, or was lost.
        """
        id_ = new_object_id("similar")
        home = self._encoder.dispatcher.core.region
        dispatch_request = DispatchRequest(
            id=id_,
            organisation=organisation,
            flow=flow,
            prompt_tokens=len(tokens),
            prompts=[tokens],
            max_tokens=0,
            choices=1,
            arrived_s=self._clock.monotonic_s(),
            regions=None if regions is None or home is None else regions | {home},
        )
        request = EngineRequest(id=id_, prompt=tokens, sampling=_SAMPLING, flow=flow, similar=search, known_as=id_)
        async with self._encoder.dispatcher.enqueue(dispatch_request) as entry:
            endpoint = await entry.wait_dispatched()
            async with endpoint.replica.generate(request) as stream:
                entry.on_submitted()
                delta = await _last_delta(stream)
            entry.on_first_token()
            entry.charge_tokens(prompt_tokens=len(tokens))
        if delta.similar is None:
            raise ReplicaLost
        return delta.similar

    async def train(self, labels: Sequence[LabelledPair]) -> bytes:
        """Trains a verifier while nothing waits for the encoder; returns its weights, or nothing if it cannot.

        Raises:
            MaitredError: The encoder is down, or was lost.
        """
        id_ = new_object_id("training")
        request = EngineRequest(
            id=id_, prompt=[], sampling=_SAMPLING, similar=VerifierTraining([*labels]), known_as=id_
        )
        async with self._encoder.client.generate(request) as stream:
            delta = await _last_delta(stream)
        return delta.verifier or b""

    def update(self, update: UpdateSimilar) -> None:
        """Changes the index of cached questions, or the verifiers; does nothing while the encoder is down."""
        self._encoder.client.update_similar(update)


async def _last_delta(stream: TokenStream) -> TokenDelta:
    async for deltas in stream:
        for delta in deltas:
            if delta.finish is not None:
                return delta
    raise ReplicaLost

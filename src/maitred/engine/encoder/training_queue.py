"""Queue of trainings of verifiers, which an encoder runs in units while no text waits, one training after the other."""

from collections.abc import Generator, Hashable
from dataclasses import dataclass

from maitred.core.request import EngineRequest, FinishReason, TokenDelta
from maitred.engine import request_log
from maitred.wire.frames import TokenOutput


@dataclass(frozen=True, slots=True)
class _Training:
    request: EngineRequest
    arrived_s: float
    units: Generator[None, None, bytes]

    def is_expired(self, now_s: float) -> bool:
        deadline_in_s = self.request.deadline_in_s
        return deadline_in_s is not None and now_s - self.arrived_s >= deadline_in_s


class TrainingQueue:
    """Queue of trainings; the first one runs."""

    def __init__(self) -> None:
        self._trainings: dict[tuple[Hashable, str], _Training] = {}

    def __len__(self) -> int:
        return len(self._trainings)

    def __contains__(self, key: tuple[Hashable, str]) -> bool:
        """Whether the request of an owner is a training that has not ended."""
        return key in self._trainings

    def add(self, owner: Hashable, request: EngineRequest, units: Generator[None, None, bytes], now_s: float) -> None:
        """Appends a training, which runs when those before it have ended.

        Args:
            owner: Who gets the weights.
            request: Request for the training; its id is unique per owner.
            units: Work in units; returns the weights of the verifier.
            now_s: Time of the clock that `run_unit` is called with.
        """
        self._trainings[owner, request.id] = _Training(request, now_s, units)

    def cancel(self, owner: Hashable, request_id: str) -> bool:
        """Ends a training, and returns whether there was one."""
        return self._trainings.pop((owner, request_id), None) is not None

    def cancel_owner(self, owner: Hashable) -> None:
        """Ends all trainings of an owner."""
        for key in [key for key in self._trainings if key[0] == owner]:
            del self._trainings[key]

    def run_unit(self, now_s: float) -> tuple[Hashable, TokenOutput] | None:
        """Runs one unit of the first training; returns its end and its owner if it has ended."""
        (owner, request_id), training = next(iter(self._trainings.items()))
        if training.is_expired(now_s):
            delta = TokenDelta(0, [], FinishReason.DEADLINE)
        else:
            with request_log.log_failed_step([training.request]):
                weights = _advance(training.units)
            if weights is None:
                return None
            delta = TokenDelta(0, [], FinishReason.STOP, verifier=weights)
        del self._trainings[owner, request_id]
        return owner, TokenOutput(request_id, delta)


def _advance(units: Generator[None, None, bytes]) -> bytes | None:
    """Runs one unit; returns the weights if it was the last one."""
    try:
        next(units)
    except StopIteration as end:
        weights: bytes = end.value
        return weights
    return None

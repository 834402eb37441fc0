"""The cache of answers of a worker: the controller keeps the answers of all workers in its memory."""

import math

from maitred.app.workers.controller_client import ControllerClient
from maitred.cache.answer_key import AnswerKey
from maitred.cache.backend import StoredAnswer
from maitred.core.errors import Unavailable
from maitred.wire.worker_protocol import AnswerQuery, AnswerReply, AnswerStored


class RemoteBackend:
    """Answers in the memory of the controller. Implements `maitred.cache.backend.AnswerBackend`.

    Args:
        controller: The client of the controller.
    """

    def __init__(self, controller: ControllerClient) -> None:
        self._controller = controller

    async def get(self, key: AnswerKey) -> StoredAnswer | None:
        """Asks the controller for an answer; None: there is none, or the controller is away."""
        if not self._controller.is_connected:
            return None
        try:
            reply = await self._controller.query(lambda number: AnswerQuery(number, *_fields(key)))
        except Unavailable:
            return None
        assert isinstance(reply, AnswerReply)
        return None if reply.answer is None else StoredAnswer(reply.answer, reply.fingerprint)

    def put(self, key: AnswerKey, answer: bytes, ttl_s: float, fingerprint: str, since_s: float = math.inf) -> None:
        """Sends the controller an answer to keep, unless it is away."""
        if self._controller.is_connected:
            self._controller.send(
                AnswerStored(*_fields(key), answer=answer, ttl_s=ttl_s, fingerprint=fingerprint, since_s=since_s)
            )


def _fields(key: AnswerKey) -> tuple[bytes, str, str, str, str, str]:
    return key.digest, key.tenant, key.organisation, key.model, key.server, key.epoch

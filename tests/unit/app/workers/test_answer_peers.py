"""Answers among processes: what belongs to whom."""

import asyncio

import pytest
from msgspec.structs import replace

from maitred.app.request.answer_sharing import ClaimResult
from maitred.app.request.peer_answer import PeerAnswer
from maitred.app.workers.answer_peers import ControllerPeers, PeerReaders
from maitred.core.context import CacheStatus, RequestContext
from maitred.core.errors import ReplicaLost
from maitred.core.flow import PriorityClass
from maitred.core.inference import TextDelta
from maitred.core.request import FinishReason, Usage
from maitred.wire.error_codec import decode_error
from maitred.wire.worker_protocol import AnswerClaim, AnswerEnded, AnswerPart, ClaimReply, ReaderJoined
from tests.unit.app.request.test_coalescing import GatedReplica, Gateway, greedy, settle
from tests.unit.app.request.test_pipeline import text_of


class Worker:
    """A process as the controller sees it; keeps what it is sent."""

    def __init__(self):
        self.heard = []

    def send(self, message):
        self.heard.append(message)


def part(number):
    return AnswerPart(number, [], True, Usage(1, 1), [], [], False)


def test_only_who_computes_an_answer_gives_its_parts():
    peers, leader, follower, other = ControllerPeers(), Worker(), Worker(), Worker()
    peers.handle(leader, AnswerClaim(5, b"answer"))
    peers.handle(follower, AnswerClaim(7, b"answer"))
    assert leader.heard[0] == ClaimReply(5)
    assert follower.heard == [ClaimReply(7, is_read=True)]
    joined = leader.heard[1]
    assert isinstance(joined, ReaderJoined)
    peers.handle(other, part(joined.number))
    peers.handle(other, AnswerEnded(joined.number))
    peers.handle(follower, part(joined.number))
    assert len(follower.heard) == 1, "a number of an earlier controller can be that of another reader now"
    peers.handle(leader, part(joined.number))
    peers.handle(leader, AnswerEnded(joined.number))
    assert follower.heard[1:] == [part(7), AnswerEnded(7)]


def test_readers_of_a_process_that_dies_are_told():
    peers, leader, follower = ControllerPeers(), Worker(), Worker()
    peers.handle(leader, AnswerClaim(5, b"answer"))
    peers.handle(follower, AnswerClaim(7, b"answer"))
    peers.on_disconnect(leader)
    assert type(decode_error(follower.heard[-1].error)) is ReplicaLost
    peers.handle(follower, AnswerClaim(8, b"answer"))
    assert follower.heard[-1] == ClaimReply(8)


async def test_a_reader_of_the_next_controller_can_have_the_number_of_an_earlier_one():
    gateway = Gateway()
    running, readers, early, late = gateway.start(), PeerReaders(gateway.sharing), [], []
    await settle()
    ((digest, _),) = gateway.sharing._coalesced
    readers.join(1, digest, early.append)
    await settle()
    readers.leave_all()
    readers.join(1, digest, late.append)
    await settle()
    heard = len(early)
    gateway.replica.let(1)
    await settle()
    assert (len(early), len(late) > 1) == (heard, True)
    running.cancel()
    await settle()
    assert gateway.replica.open == 1, "it is read"
    readers.leave(1)
    await settle()
    assert gateway.replica.open == 0
    assert running.cancelled()


class EndedElsewhere:
    """Peers of which one has just ended the answer, so that it is in the cache."""

    def __init__(self):
        self.claims, self.is_claimed, self.put = 0, False, None

    async def claim(self, digest):
        self.claims, self.is_claimed = self.claims + 1, True
        await self.put()
        return ClaimResult(self)

    def release(self, digest):
        self.is_claimed = False

    def leave(self):
        pass

    async def read(self, context, stack):
        raise ReplicaLost


async def test_an_answer_that_a_peer_has_just_ended_is_in_the_cache():
    peer = Gateway()
    peer.replica.let()
    peers = EndedElsewhere()
    peers.put = peer.ask
    gateway = Gateway(backend=peer.backend, peers=peers)
    parts, context = await gateway.ask()
    assert (text_of(parts), context.cache.status) == ("one two three", CacheStatus.HIT)
    assert gateway.replica.requests == []
    assert not peers.is_claimed


async def test_a_peer_that_never_has_the_answer_is_asked_twice_at_most():
    peers = EndedElsewhere()
    peers.put = settle
    gateway = Gateway(peers=peers)
    gateway.replica.let()
    parts, context = await gateway.ask()
    assert (text_of(parts), context.cache.status) == ("one two three", CacheStatus.MISS)
    assert (peers.claims, peers.is_claimed) == (2, False)


async def test_who_leaves_while_it_claims_claims_nothing():
    peers = EndedElsewhere()
    peers.put = asyncio.Event().wait
    gateway = Gateway(peers=peers)
    running = gateway.start(greedy(), context=RequestContext("req", 0.0))
    await settle()
    assert peers.is_claimed
    running.cancel()
    await asyncio.wait([running])
    assert not peers.is_claimed


class ComputedElsewhere:
    """Peers of which one computes the answer, but no part of it has come yet."""

    def __init__(self, priority):
        self.answer = PeerAnswer(lambda: None)
        self.answer.on_part(AnswerPart(1, [], False, Usage(1, 0), [], [], False, priority))

    async def claim(self, digest):
        return ClaimResult(self.answer)

    def release(self, digest):
        pass


@pytest.mark.parametrize(
    ("priority", "status"),
    [(PriorityClass.BATCH, CacheStatus.MISS), (PriorityClass.STANDARD, CacheStatus.COALESCED)],
)
async def test_who_stands_before_the_first_caller_at_another_process_does_not_wait_behind_it(priority, status):
    peers = ComputedElsewhere(priority)
    gateway = Gateway(peers=peers)
    gateway.replica.let()
    running = gateway.start()
    await settle()
    peers.answer.on_part(replace(part(1), parts=[TextDelta(0, "elsewhere", FinishReason.STOP)]))
    peers.answer.on_part(AnswerEnded(1))
    parts, context = await running
    assert context.cache.status is status
    assert text_of(parts) == ("elsewhere" if status is CacheStatus.COALESCED else "one two three")


async def test_an_answer_that_differs_from_what_was_sent_is_not_gone_on_with():
    peers = ComputedElsewhere(None)
    peers.wait_connected = settle
    gateway = Gateway(GatedReplica("uno dos tres"), peers=peers)
    gateway.replica.let()
    running = gateway.start()
    await settle()
    peers.answer.on_part(replace(part(1), parts=[TextDelta(0, "one")]))
    await settle()
    peers.claim = no_peer
    peers.answer.on_part(AnswerEnded(1, is_lost=True))
    with pytest.raises(ReplicaLost):
        await running
    assert gateway.replica.open == 0
    assert len(gateway.lines) == 2


async def no_peer(digest):
    return ClaimResult()

"""Session affinity without a table of sessions, by rendezvous hashing."""

import math
from collections.abc import Sequence
from hashlib import blake2b

from maitred.core.balance import ReplicaCandidate

_HASH_RANGE = 2.0**64


def session_replica(session: str, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
    """Returns the candidate that serves a session.

    Rendezvous hashing (Thaler and Ravishankar, 1998): every pair of session and replica has a number that looks random,
    and the session goes to the replica with the least one. A replica that comes or goes moves only the sessions that it
    gets or had; there is no table, and every gateway computes the same answer. Numbers are drawn from the exponential
    distribution with the weight as its rate, so each replica gets a share of the sessions equal to its share of the
    weight.
    """

    def number(candidate: ReplicaCandidate) -> float:
        digest = blake2b(f"{session}\0{candidate.name}".encode(), digest_size=8).digest()
        return -math.log((int.from_bytes(digest) + 1) / (_HASH_RANGE + 1)) / candidate.weight

    return min(candidates, key=number)

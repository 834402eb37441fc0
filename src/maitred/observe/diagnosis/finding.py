"""What a diagnosis finds."""

from enum import StrEnum

from msgspec import Struct


class FindingKind(StrEnum):
    """What holds requests up."""

    KV_MEMORY = "kv_memory"
    """The KV cache has no room for them."""
    COMPUTE = "compute"
    """The engines compute all the time, and more waits."""
    QUEUE = "queue"
    """They wait, or are refused, although there is room."""
    GATEWAY = "gateway"
    """The gateway's own work: reading, tokenising, sending."""
    UPSTREAM = "upstream"
    """A server of somebody else's, or the way there."""
    SLOW_CLIENTS = "slow_clients"
    """Their readers."""
    LIMITS = "limits"
    """What their tenants may use."""
    STORE = "store"
    """The database, the counters or the journal."""
    REPLICA = "replica"
    """An engine is not there."""
    LEAK = "leak"
    """Something grows for good. Nothing is held up yet."""
    CONFIG = "config"
    """A setting that will."""


class DiagnosisFinding(Struct, frozen=True, kw_only=True):
    """One thing that holds requests up, or will."""

    kind: FindingKind
    where: str = ""
    """Model, replica, process or setting; empty: the server as a whole."""
    weight: float
    """The part of the work that suffers, from 0 to 1: findings are told in this order."""
    summary: str
    """One sentence."""
    evidence: tuple[str, ...] = ()
    """The figures that it rests on."""
    remedy: str
    """Which setting to change in which direction, or what to do."""

"""Findings of a diagnosis: their kinds and fields."""

from enum import StrEnum

from msgspec import Struct


class FindingKind(StrEnum):
    """Kind of a finding: what delays requests."""

    KV_MEMORY = "kv_memory"
    """The KV cache is too small."""
    COMPUTE = "compute"
    """The engines compute all the time, and more requests wait."""
    QUEUE = "queue"
    """Requests wait, or are rejected, although there is free capacity."""
    GATEWAY = "gateway"
    """The gateway's own work: reading, tokenising, sending."""
    UPSTREAM = "upstream"
    """An upstream server, or the network to it."""
    SLOW_CLIENTS = "slow_clients"
    """Clients read their responses slowly."""
    LIMITS = "limits"
    """Limits and budgets of tenants reject requests."""
    STORE = "store"
    """The database, the counters or the journal."""
    REPLICA = "replica"
    """An engine is missing."""
    LEAK = "leak"
    """A resource grows permanently. Requests are not delayed yet."""
    CONFIG = "config"
    """A setting that will delay or reject requests."""


class DiagnosisFinding(Struct, frozen=True, kw_only=True):
    """One finding: what delays requests, or will."""

    kind: FindingKind
    where: str = ""
    """Model, replica, process or setting; empty: the server as a whole."""
    weight: float
    """Part of the work that suffers, from 0 to 1; findings are sorted by it."""
    summary: str
    """Summary of the finding in one sentence."""
    evidence: tuple[str, ...] = ()
    """Figures that the finding is based on."""
    remedy: str
    """Which setting to change in which direction, or what to do."""

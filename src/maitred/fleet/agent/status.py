"""Status of an agent as a gateway sees it, for operators."""

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

MAX_AGENTS = 256
"""Most agents whose status is told, so that the labels of metrics are bounded."""


class AgentStatus(Struct, frozen=True, kw_only=True):
    """Status of one agent."""

    name: str
    address: str = ""
    """Address from which it has connected; empty: it is away."""
    region: str = ""
    zone: str = ""
    gpus: int = 0
    """GPUs that its engines can use, as it tells."""
    is_connected: bool = False
    takes_orders: bool = False
    """Whether it is in the region where this gateway starts replicas."""
    fault: str = ""
    """Why it may not take part, or why this gateway starts nothing there; empty: it does."""
    replicas: int = 0
    """Engines that it has, in any phase."""
    max_replicas: int = 0
    pending_orders: int = 0
    """Starts and ends that were ordered and that it has not begun or completed."""


def count_gpus(device: str, environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Counts the GPUs that engines of this machine can use, without loading anything.

    Args:
        device: The setting `engine.device`.
        environment: The environment.
        devices: Folder of the devices of the system.
    """
    if device == "cpu":
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return sum(1 for _ in devices.glob("nvidia[0-9]*"))
    names = [name.strip() for name in visible.split(",")]
    # What follows a device that does not exist, such as -1, is not seen.
    return next((number for number, name in enumerate(names) if not name or name.startswith("-")), len(names))

"""Profiles: sets of defaults for one kind of installation, chosen by one name.

A profile is a layer of settings between the built-in defaults and the file, so the file, the environment and flags
change any of it, setting by setting. It holds only settings that depend on the number of users; `maitred tune` finds
how large batches can be on a machine.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from maitred.config.nodes import ConfigNode

ProfileName = Literal["single-user", "team", "product"]

Settings = Mapping[str, "Settings | str | int | float | bool | None"]
"""Names -> values, and names of sections -> the settings below them."""


class ConfigProfile(Struct, frozen=True):
    """Profile: defaults for one kind of installation.

    Attributes:
        summary: Purpose of the profile and its effect, in one sentence.
        settings: Section -> setting -> value. Everything else keeps its default.
    """

    summary: str
    settings: Settings


PROFILES: Mapping[ProfileName, ConfigProfile] = {
    "single-user": ConfigProfile(
        "One person at a time: first come, first served, a small batch, and no limits on the queue.",
        {
            "server": {"retry_share": 1.0},
            "engine": {"max_sequences": 8, "line": {"policy": "fifo"}},
            "dispatch": {
                "line": {"policy": "fifo"},
                "max_waiting": {},
                # The limit is finite, because it also limits how long a request waits for an engine that does not come
                # back.
                "max_wait_s": dict.fromkeys(("interactive", "standard", "batch", "background"), 3600.0),
            },
        },
    ),
    "team": ConfigProfile(
        "5 to 20 people who know each other: urgent requests first, and a queue that says when it is full.",
        {
            "engine": {"max_sequences": 32, "line": {"policy": "priority"}},
            "dispatch": {
                "line": {"policy": "priority"},
                "max_waiting": {"interactive": 50, "standard": 100, "batch": 500, "background": 500},
                "max_wait_s": {"interactive": 30.0, "standard": 60.0, "batch": 900.0, "background": 3600.0},
            },
        },
    ),
    "product": ConfigProfile(
        "Hundreds of callers who do not: fair shares between tenants, room kept for light ones, deadlines, batches "
        "that adapt, and retries kept in bounds.",
        {
            "server": {"retry_share": 0.2},
            "engine": {
                "max_sequences": 128,
                "line": {"policy": "fair", "ageing_s": 30.0},
                # Ten tokens a second are faster than people read. A machine that is too slow for it still batches.
                "itl_objective_s": 0.1,
                "min_sequences": 8,
                "batching_window_s": {"batch": 0.05, "background": 0.1},
            },
            "dispatch": {
                "line": {"policy": "fair", "ageing_s": 30.0},
                "max_waiting": {"interactive": 1000, "standard": 2000, "batch": 10_000, "background": 10_000},
                "max_wait_s": {"interactive": 30.0, "standard": 60.0, "batch": 900.0, "background": 3600.0},
                "ttft_s": {"interactive": 10.0, "standard": 30.0},
                "headroom": 0.07,
            },
        },
    ),
}


def profile_layer(root: ConfigNode) -> ConfigNode:
    """Returns the settings of the profile that the layers name, each with ``profile team`` as its origin.

    Args:
        root: All other layers, merged. A `profile` that does not exist is left for the struct builder to report.
    """
    named = root.value.get("profile") if isinstance(root.value, dict) else None
    for name, profile in PROFILES.items():
        if named is not None and named.value == name:
            return _make_node(profile.settings, f"profile {name}")
    return ConfigNode({}, root.origin)


def _make_node(value: "Settings | str | int | float | bool | None", origin: str) -> ConfigNode:
    if isinstance(value, Mapping):
        return ConfigNode({name: _make_node(below, origin) for name, below in value.items()}, origin)
    return ConfigNode(value, origin)

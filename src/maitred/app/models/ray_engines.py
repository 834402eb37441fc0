"""Engines of the `model` section on a Ray cluster."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.core.secret import Secret
from maitred.fleet.backend import BackendFacts
from maitred.fleet.ray.backend import RayBackend
from maitred.fleet.remote import FingerprintCheck

_MAX_STARTS = 8
"""Most replicas that start at a time: Ray puts them on several machines."""


def make_ray_backend(config: Config, fingerprint_check: FingerprintCheck, clock: Clock) -> RayBackend:
    """Makes the backend of the engines that Ray Serve runs.

    Args:
        config: The configuration.
        fingerprint_check: Check of the model that an engine runs.
        clock: The clock.
    """
    ray = config.ray
    if not ray.replica.model and config.model.path:
        folder = str(config.model.folder.resolve())
        ray = replace(ray, replica=replace(ray.replica, model=folder))
    return RayBackend(
        ray,
        config.engine_link,
        check_card=fingerprint_check.check,
        settings=engine_settings(config),
        facts=BackendFacts(
            max_replicas=ray.replica.max_replicas,
            max_starts=_MAX_STARTS,
            expected_start_s=30.0,
            gpus_per_replica=ray.replica.num_gpus,
        ),
        clock=clock,
    )


def engine_settings(config: Config) -> dict[str, Any]:
    """Returns the settings of this gateway that its engines need, without defaults; secrets are references."""
    sections = {
        "engine": config.engine,
        "engine_link": config.engine_link,
        "dispatch": {"service": config.dispatch.service},
    }
    return {name: plain for name, section in sections.items() if (plain := _without_defaults(section))}


def _without_defaults(value: object) -> Any:  # noqa: ANN401 - any value of a setting
    if isinstance(value, Secret):
        return msgspec.yaml.decode(value.reference)
    if isinstance(value, Mapping):
        return {key: plain for key, entry in value.items() if (plain := _without_defaults(entry)) not in ({}, None)}
    if isinstance(value, msgspec.Struct):
        default = type(value)()
        return {
            field: _without_defaults(entry)
            for field in value.__struct_fields__
            if (entry := getattr(value, field)) != getattr(default, field)
        }
    return msgspec.to_builtins(value)

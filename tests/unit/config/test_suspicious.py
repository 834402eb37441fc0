"""Every trap is found in settings that have it, and none in those that come with maitred."""

from functools import reduce

import msgspec
import pytest

from maitred.config.loader import load
from maitred.config.profiles import ProfileName
from maitred.config.suspicious import suspicious_settings
from maitred.config.tree import BUNDLED_MODEL

ENVIRONMENT = {"DATABASE": "postgresql://db/maitred", "REDIS": "redis://there", "LINK": "correct horse battery staple"}
ON_RAY = {"model.backend": "ray", "engine_link.secret": {"env": "LINK"}, "engine_link.allow_plaintext": True}


@pytest.fixture
def found(tmp_path):
    """Where the traps of a file with these settings are, written with dots."""

    def find(settings, cores=8):
        nested = {}
        for key, value in settings.items():
            *sections, name = key.split(".")
            reduce(lambda node, section: node.setdefault(section, {}), sections, nested)[name] = value
        file = tmp_path / "maitred.yaml"
        file.write_bytes(msgspec.yaml.encode(nested))
        return [finding.where for finding in suspicious_settings(load(file, ENVIRONMENT).config, cores=cores)]

    return find


def test_the_defaults_have_none(found):
    assert found({}) == []


@pytest.mark.parametrize("profile", list(ProfileName.__args__))
def test_profiles_have_none(found, profile):
    assert found({"profile": profile}) == []


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"server.host": "0.0.0.0", "server.allow_unauthenticated": True}, "server.allow_unauthenticated"),
        ({"engine.kv_memory_bytes": 1 << 20}, "engine.kv_memory_bytes"),
        ({"engine.kv_memory_bytes": 16 << 20}, "engine.max_sequences"),
        ({"engine.step_tokens": 130}, "engine.step_tokens"),
        ({"engine.threads": 5, "model.replicas": 2}, "engine.threads"),
        ({"dispatch.ttft_s": {"interactive": 0.005}}, "dispatch.ttft_s.interactive"),
        ({"dispatch.tenant_ttft_s": {"acme": 0.1}, "engine.itl_objective_s": 0.2}, "dispatch.tenant_ttft_s.acme"),
        ({"dispatch.max_waiting": {"batch": 0}}, "dispatch.max_waiting.batch"),
        ({"server.max_in_flight": 100}, "server.max_in_flight"),
        ({"store.url": {"env": "DATABASE"}}, "counters.url"),
        (
            {"counters.url": {"env": "REDIS"}, "identity.limits_per_key.requests_per_minute": 20},
            "identity.limits_per_key.requests_per_minute",
        ),
        ({"identity.limits.tokens_per_minute": 9000}, "identity.limits.tokens_per_minute"),
        ({"identity.limits_per_tenant.usd_per_day": 5}, "identity.limits_per_tenant.usd_per_day"),
        ({"server.heartbeat_s": 60}, "server.heartbeat_s"),
        ({**ON_RAY, "ray.replica.first_port": 40_000}, "ray.replica.first_port"),
        ({**ON_RAY, "model.autoscaling.enabled": True}, "model.autoscaling.enabled"),
        ({"model.backend": "agents"}, "model.backend"),
        (
            {"models.far.upstreams": [{"url": "http://x/v1", "dialect": "ollama", "first_part_timeout_s": 5}]},
            "models.far.upstreams.0.first_part_timeout_s",
        ),
    ],
)
def test_a_trap(found, settings, where):
    assert found(settings) == [where]


def test_engines_on_ray_have_none_by_themselves_and_other_cores(found):
    assert found({**ON_RAY, "engine.threads": 5, "model.replicas": 2}) == []
    shared = {"store.url": {"env": "DATABASE"}, "counters.url": {"env": "REDIS"}}
    assert found({**ON_RAY, **shared, "model.autoscaling.enabled": True}) == []


def test_a_model_that_loads_for_longer_than_anybody_waits(found):
    on_demand = {"models": {"late": {"path": str(BUNDLED_MODEL)}}, "dispatch.max_wait_s": {"interactive": 1}}
    assert found(on_demand) == ["dispatch.max_wait_s.interactive"]
    on_demand["models"]["late"]["pinned"] = True
    assert found(on_demand) == []


def test_limits_of_tenants_are_looked_at_with_those_of_their_teams_and_models(found):
    tenants = {"acme": {"teams": {"lab": {"limits": {"models": {"m": {"output_tokens_per_minute": 9}}}}}}}
    assert found({"tenants": tenants}) == ["tenants.acme.teams.lab.limits.models.m.output_tokens_per_minute"]
    assert found({"tenants": tenants, "admission.default_output_tokens": 64}) == []

"""Traps of engines on Ray, each with settings or an application that have it and that have not."""

import msgspec
import pytest

from maitred.core.secret import Secret
from maitred.fleet.ray.config import RayConfig, RayReplicaConfig
from maitred.fleet.ray.serve_api import DeploymentOptions, ServeApplication, ServeDeployment, ServeReplica
from maitred.fleet.ray.traps import application_traps, cluster_traps, config_traps
from maitred.testing.server_process import free_port

TOKEN = Secret("a token of the cluster", "{env: T}")
SOUND = ServeApplication(
    status="RUNNING",
    external_scaler_enabled=True,
    deployed_app_config={},
    deployments={
        "engine-0": ServeDeployment(
            "HEALTHY", "", 1, [ServeReplica("r", "RUNNING", "10.0.0.1")], DeploymentOptions({"port": 9200}, 45.0)
        ),
        "theirs": ServeDeployment("HEALTHY", "", 1, [ServeReplica("r", "RUNNING", "127.0.0.1")]),
    },
)


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (RayConfig(), None),
        (RayConfig(token=TOKEN), None),
        (RayConfig(token=TOKEN, address="https://ray-head:8265"), None),
        (RayConfig(token=TOKEN, address="http://ray-head:8265"), "ray.address"),
        (RayConfig(replica=RayReplicaConfig(first_port=32761)), "ray.replica.first_port"),
        (RayConfig(replica=RayReplicaConfig(first_port=32760)), None),
        (RayConfig(replica=RayReplicaConfig(stop_grace_s=20)), "ray.replica.stop_grace_s"),
    ],
)
def test_settings(config, setting):
    assert [trap.setting for trap in config_traps(config)] == [setting] * (setting is not None)


def changed(**deployment):
    replaced = msgspec.structs.replace(SOUND.deployments["engine-0"], **deployment)
    return msgspec.structs.replace(SOUND, deployments={"engine-0": replaced})


@pytest.mark.parametrize(
    ("application", "config", "setting"),
    [
        (SOUND, {}, None),
        (msgspec.structs.replace(SOUND, external_scaler_enabled=False), {}, "ray.replica.scaling"),
        (SOUND, {"replica": RayReplicaConfig(scaling="policy")}, None),
        (
            msgspec.structs.replace(SOUND, deployed_app_config=None),
            {"replica": RayReplicaConfig(scaling="policy")},
            "ray.replica.scaling",
        ),
        (changed(deployment_config=DeploymentOptions({"port": 9200}, 20.0)), {}, "engine-0"),
        (changed(replicas=[ServeReplica("r", "RUNNING", "127.0.0.1")]), {}, "ray.address"),
        (changed(replicas=[ServeReplica("r", "RUNNING", "127.0.0.1")]), {"address": "http://127.0.0.1:8265"}, None),
    ],
)
def test_applications(application, config, setting):
    traps = application_traps(RayConfig(**{"address": "http://ray-head:8265", **config}), application)
    assert [trap.setting for trap in traps] == [setting] * (setting is not None)


async def test_a_cluster_that_does_not_answer():
    (trap,) = await cluster_traps(RayConfig(address=f"http://127.0.0.1:{free_port()}"))
    assert "does not answer" in trap.evidence

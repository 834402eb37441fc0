"""Which gateways share the lease of a model's replicas."""

from contextlib import ExitStack

import pytest

from maitred.app.assembly.scaling import make_claims, make_scalers
from maitred.config.loader import load
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.pool import ReplicaPool
from maitred.scaling.startup_times import StartKind, StartupTimes
from tests.support.dispatchers import DispatchSetup
from tests.support.scaling.leases import PaperExchange, PaperLeases
from tests.support.servers.paper_fleet import PaperBackend

SHARED = (
    "model: {autoscaling: {enabled: true}, backend: BACKEND}\nengine_link: {secret: {env: L}, allow_plaintext: true}\n"
)


@pytest.fixture
def lease_of(tmp_path):
    """The name of the lease of a gateway that uses a data folder, and goes on to run or ends."""

    def find(folder, model="chat", backend="ray", ray="{}", *, runs=False):
        file = tmp_path / "maitred.yaml"
        text = f"store: {{folder: {tmp_path / folder}}}\nray: {ray}\n"
        file.write_text(SHARED.replace("BACKEND", backend) + text)
        config = load(file, {"L": "correct horse battery staple"}).config
        setup = DispatchSetup()
        paper = PaperBackend(setup.clock)
        pool = ReplicaPool(paper, DesiredReplicas(1), StartupTimes({StartKind.WEIGHTS_CACHED: 4.0}), setup.clock)
        claims = make_claims(config, {model: pool}, PaperLeases(setup.clock), setup.clock)
        made = make_scalers(
            config,
            {model: pool},
            {model: setup.dispatcher},
            claims=running.enter_context(claims),
            exchange=PaperExchange(),
            clock=setup.clock,
        )
        (scaler,) = made.values()
        assert (scaler.shared is None) == (backend == "local"), "nobody else has a demand for what is its own"
        if not runs:
            running.close()
        return scaler.lease.lease.pool

    with ExitStack() as running:
        yield find


async def test_gateways_of_one_ray_application_share_a_lease(lease_of):
    assert lease_of("a") == lease_of("b", model="another name of it")
    assert lease_of("a") != lease_of("a", ray="{application: other}")
    assert lease_of("a") != lease_of("a", ray="{address: 'http://other:8265'}")


async def test_gateways_with_agents_of_one_region_share_the_lease_of_a_model(lease_of):
    assert lease_of("a", backend="agents") == lease_of("b", backend="agents")
    assert lease_of("a", backend="agents") != lease_of("a", model="another", backend="agents")
    assert lease_of("a", backend="agents") != lease_of("a", backend="agents", ray="{}\nregion: eu")


async def test_replicas_of_the_gateway_have_a_lease_of_its_own(lease_of):
    assert lease_of("a", backend="local") != lease_of("b", backend="local")
    assert lease_of("a", backend="local") == lease_of("a", backend="local")


async def test_gateways_that_use_one_folder_at_the_same_time_have_a_lease_each(lease_of):
    one = lease_of("a", backend="local", runs=True)
    assert lease_of("a", backend="local") != one
    assert lease_of("a", backend="local") == one, "neither runs any more"

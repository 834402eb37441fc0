"""What the sleep of models watches, while replicas come, sleep as a reserve, wake and go."""

from types import SimpleNamespace

from maitred.app.admin.sleep import SleepableModelAdmin
from maitred.dispatch.request import Endpoint
from maitred.fleet.sleepable_replica import SleepableReplica
from tests.support.servers.paper_fleet import PaperClient


class Pool:
    """Pool that calls its listener when a test says so."""

    def __init__(self):
        self.endpoint_states = []

    def on_endpoints(self, listener):
        self.tell = listener


def test_each_engine_is_watched_once_however_often_it_sleeps_and_wakes():
    pool, other = Pool(), Pool()
    resident = {
        name: (SimpleNamespace(core=SimpleNamespace(endpoint_states=pool_.endpoint_states)), pool_)
        for name, pool_ in {"m": pool, "other": other}.items()
    }
    SleepableModelAdmin(None, resident)
    client = PaperClient()
    replica = SleepableReplica(client)
    pool.endpoint_states.append(SimpleNamespace(endpoint=Endpoint("r0", replica)))
    for is_reserved in (False, True, False, True):
        replica.is_reserved = is_reserved
        other.tell()
        pool.tell()
    assert len(client.listeners) == 1

"""Parts of the replicas that do not go together."""

from maitred.dispatch.config import DispatchConfig, TenantPoolConfig, dispatch_faults


def faults(**settings):
    return list(dispatch_faults(DispatchConfig(**settings)))


def test_a_little_must_be_left_for_the_others():
    assert faults() == []
    assert faults(reserved={"acme": 0.5}, pools={"gold": TenantPoolConfig(tenants=["rich"], share=0.4)}) == []
    ((key, message),) = faults(reserved={"acme": 0.5}, pools={"gold": TenantPoolConfig(tenants=["rich"], share=0.5)})
    assert key == "dispatch.pools"
    assert "100%" in message
    ((key, _),) = faults(reserved={"acme": 0.99})
    assert key == "dispatch.reserved"


def test_a_tenant_has_one_part():
    pools = {
        "gold": TenantPoolConfig(tenants=["rich", "acme"], share=0.2),
        "silver": TenantPoolConfig(tenants=["rich"], share=0.1),
    }
    found = dict(faults(reserved={"acme": 0.1}, pools=pools))
    assert "'acme' is named 2 times" in found["dispatch.reserved"]
    assert "'rich' is named 2 times" in found["dispatch.pools"]

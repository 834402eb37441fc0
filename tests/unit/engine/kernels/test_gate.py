import pytest
import torch

from maitred.engine.kernels.gate import gate, gate_fused, make_gate


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("rows", "inner"), [(1, 704), (33, 96), (0, 64), (5, 7)])
def test_the_fused_pass_equals_the_specification(rows, inner, gelu):
    gate_up = torch.randn(rows, 2 * inner, generator=torch.Generator().manual_seed(rows)) * 5
    torch.testing.assert_close(gate_fused(gate_up, gelu=gelu), gate(gate_up, gelu=gelu), rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize(("gelu", "most"), [(False, 1e30), (True, 1e12)])
def test_a_gate_that_is_all_but_shut_or_all_open(gelu, most):
    opening = torch.tensor([[-100.0, -87.0, -20.0, 0.0, -0.0, 20.0, most]])
    gate_up = torch.cat([opening, torch.full_like(opening, 2.0)], 1)
    torch.testing.assert_close(gate_fused(gate_up, gelu=gelu), gate(gate_up, gelu=gelu))


def test_a_row_does_not_depend_on_the_others():
    gate_up = torch.randn(600, 200, generator=torch.Generator().manual_seed(0))
    together = gate_fused(gate_up)
    for count in (1, 2, 17, 511):
        assert torch.equal(gate_fused(gate_up[:count]), together[:count])
        assert torch.equal(gate_fused(gate_up[-count:]), together[-count:])


def test_only_fp32_on_a_cpu_is_fused():
    assert make_gate(torch.float32, torch.device("cpu")) is gate_fused
    assert make_gate(torch.bfloat16, torch.device("cpu")) is gate
    assert make_gate(torch.float32, torch.device("cuda")) is gate

"""Weights that torchao rounds, on a CPU: a GPU computes the same in 8 bits."""

from importlib.util import find_spec

import pytest
import torch

from maitred.engine.kernels.linear import make_linear

pytestmark = [
    # Not imported to find that out: it imports torch's compiler.
    pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of its compiled parts, which are for GPUs
]


@pytest.mark.parametrize(("scheme", "most"), [("int8", 0.03), ("int8_weight_only", 0.02), ("fp8_weight_only", 0.06)])
@pytest.mark.parametrize("biased", [True, False])
def test_products_are_near_those_of_the_exact_weight(scheme, most, biased):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).bfloat16()
    bias = torch.randn(96, generator=generator).bfloat16() if biased else None
    rows = torch.randn(5, 64, generator=generator).bfloat16()
    exact = torch.nn.functional.linear(rows, weight, bias).float()
    with torch.inference_mode():
        rounded = make_linear(weight, bias, scheme, accelerated=True)(rows).float()
    assert (rounded - exact).norm() < most * exact.norm()
    assert not torch.equal(rounded, exact)

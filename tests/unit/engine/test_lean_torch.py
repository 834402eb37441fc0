import subprocess
import sys

LEAN = """
import sys
from maitred.engine.lean_torch import complete_torch, import_lean_torch

import_lean_torch()
import torch

assert torch.equal(torch.ones(2, 3) @ torch.ones(3, 1), torch.full((2, 1), 3.0))
left_out = "torch._prims" not in sys.modules and "torch._meta_registrations" not in sys.modules
complete_torch()
torch.rand(2, generator=torch.Generator().manual_seed(0))
upsampled = torch.ops.aten.native_dropout_backward(*2 * [torch.empty(2, 4, device="meta")], 1.0)
print(left_out, tuple(upsampled.shape), "torch._prims" in sys.modules)
"""


def test_what_is_left_out_of_torch_can_be_had_later():
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "True (2, 4) True"
    assert not done.stderr

import os
import subprocess
import sys

LEAN = """
import sys
from maitred.engine.lean_torch import complete_torch, import_lean_torch

import_lean_torch()
import torch

assert torch.equal(torch.ones(2, 3) @ torch.ones(3, 1), torch.full((2, 1), 3.0))
left_out = not {"torch._prims", "torch._meta_registrations", "torch.export", "torch.distributions"} & sys.modules.keys()
left_out = left_out and not hasattr(torch, "export") and not hasattr(torch.nn, "quantized")
complete_torch()
torch.rand(2, generator=torch.Generator().manual_seed(0))
upsampled = torch.ops.aten.native_dropout_backward(*2 * [torch.empty(2, 4, device="meta")], 1.0)
assert torch.distributions.Normal(0.0, 1.0).sample().shape == ()
assert torch.masked.as_masked_tensor and torch.nn.quantized.Linear and torch.quantization.QuantStub
assert torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),)).module()(torch.ones(1, 2)).shape == (1, 3)
print(left_out, tuple(upsampled.shape), "torch._prims" in sys.modules)
"""


def test_what_is_left_out_of_torch_can_be_had_later():
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "True (2, 4) True"
    assert not done.stderr


THREADS = """
import os
from maitred.engine.lean_torch import wait_briefly_at_barriers

wait_briefly_at_barriers()
import numpy as np

before = len(os.listdir("/proc/self/task"))
np.ones((4096, 384), np.float32) @ np.ones(384, np.float32)
print(before, len(os.listdir("/proc/self/task")))
"""


def test_products_of_numpy_are_computed_on_one_thread():
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", THREADS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["1", "1"]

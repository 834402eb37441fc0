"""torch without its compilers, in a process that has not imported it before."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from maitred.engine.eager_torch import import_torch_for
import_torch_for({device!r})
import torch
print(sorted({{"torch.export", "torch._meta_registrations", "torch._prims"}} & sys.modules.keys()))
rows = torch.arange(6.0).view(2, 3)
assert torch.nn.functional.linear(rows, rows).tolist() == [[5.0, 14.0], [14.0, 50.0]]
import torch.export
assert callable(torch.export.export), "what is asked for later is the real thing"
import torch._meta_registrations
assert torch.mm(torch.empty(2, 3, device="meta"), torch.empty(3, 4, device="meta")).shape == (2, 4)
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compilers_are_imported_when_they_are_asked_for(device):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(device=device)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout.strip() == "[]") == (device == "cpu")

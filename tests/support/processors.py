"""What holds on some processors only: of MKL, and of Triton's interpreter."""

import os
from pathlib import Path

import pytest
import torch

_PROCESSORS = Path("/proc/cpuinfo")

MKL_WITH_AVX_512 = (
    torch.backends.mkl.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and _PROCESSORS.exists()
    and "GenuineIntel" in _PROCESSORS.read_text()
)
"""Whether MKL computes with AVX-512 here: on the processors of others it does not, whatever they have."""

needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="there is a GPU: tests/gpu runs the kernels on it"
)
"""For tests that give Triton's kernels the tensors of a CPU. Without a GPU, tests/conftest.py asks for the interpreter,
which Triton decides when it is imported."""

"""What holds of MKL on some processors only."""

from pathlib import Path

import torch

_PROCESSORS = Path("/proc/cpuinfo")

MKL_WITH_AVX_512 = (
    torch.backends.mkl.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and _PROCESSORS.exists()
    and "GenuineIntel" in _PROCESSORS.read_text()
)
"""Whether MKL computes with AVX-512 here: on the processors of others it does not, whatever they have."""

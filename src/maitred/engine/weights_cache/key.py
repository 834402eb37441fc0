"""What kept weights depend on, as one short name: when any of it is different, so is the name."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from maitred import __version__
from maitred.engine.kernels.registers import VECTOR_LANES
from maitred.engine.models.digest import shape_digest, weights_digest, weights_stamps

_FORMAT = 6
"""Count this up when a linear keeps its weights otherwise under the same name."""


def cache_key(folder: Path, form: Mapping[str, object]) -> str:
    """The name under which a model's weights are kept.

    It holds for this model, this processor, these versions, and as many threads, for which MKL lays weights out.

    Args:
        folder: The checkpoint.
        form: What else decides how its weights are computed with, such as their type; JSON can say it.
    """
    # The digest reads samples. A number that was changed by hand shows in the file's date.
    depends_on = [
        *(_FORMAT, __version__, shape_digest(folder), weights_digest(folder), weights_stamps(folder)),
        *(dict(form), _processor(), VECTOR_LANES),
        *(torch.__version__, torch.__config__.show(), torch.get_num_threads()),
        {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("MKL_", "ONEDNN_", "DNNL_", "NUMBA_CPU_"))
        },
    ]
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:32]


def _processor() -> list[str]:
    """Its name and what it can do; MKL lays weights out for both."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    return [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]

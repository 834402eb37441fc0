"""Key of cached weights: a short hash of everything that the weights depend on."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from maitred import __version__
from maitred.engine.compiled import VECTOR_LANES
from maitred.engine.models.digest import shape_digest, weights_digest, weights_stamps

_FORMAT = 8
"""Version of the stored form; raise it when the same checkpoint gives other weights, or they are stored differently."""


def cache_key(folder: Path, form: Mapping[str, object]) -> str:
    """Computes the key under which a model's weights are cached.

    The key depends on the model, the processor, the versions, and the number of threads, for which MKL lays weights
    out.

    Args:
        folder: Folder of the checkpoint.
        form: Further values that determine the weights, such as their type; JSON can represent them.
    """
    # The digest reads samples only; a number that was changed by hand changes the file's modification time.
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
    """Returns the processor's name and features, on which MKL's layout depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    return [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]

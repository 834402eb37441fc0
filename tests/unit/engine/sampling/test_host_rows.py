from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from maitred.core.request import SamplingParams
from maitred.engine.sampling import host_rows
from maitred.engine.sampling.draw import DrawParameters
from maitred.engine.sampling.host_rows import HostRows


@pytest.mark.parametrize("helpers", [0, 1, 2, 5, 40])
def test_threads_change_nothing(monkeypatch, helpers):
    monkeypatch.setattr(host_rows, "_LOGITS_WORTH_A_THREAD", 1)
    params = [SamplingParams(max_tokens=1, seed=i, temperature=i / 4, top_p=0.9) for i in range(11)]
    parameters = DrawParameters.of(params, [0] * 11)
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((11, 700)).astype(np.float32))
    bits = np.random.default_rng(2).integers(0, 1 << 32, 11)
    with ThreadPoolExecutor(3) as pool:
        alone = HostRows(parameters, pool, 0).draw(logits, bits)
        assert HostRows(parameters, pool, helpers).draw(logits, bits) == alone

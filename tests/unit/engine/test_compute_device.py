import logging

import pytest
import torch

from maitred.core.errors import ConfigInvalid
from maitred.engine.device import ComputeDevice, kv_bytes_on_gpu

GIB = 1 << 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_cpu_is_used_and_logged_once(caplog):
    with caplog.at_level(logging.INFO, "maitred.engine"):
        assert ComputeDevice.of("auto") == ComputeDevice(torch.device("cpu"), accelerated=False)
        assert ComputeDevice.of("cpu") == ComputeDevice(torch.device("cpu"), accelerated=False)
    assert [record.getMessage() for record in caplog.records if "No GPU" in record.getMessage()] == [
        caplog.records[0].getMessage()
    ]
    assert caplog.records[0].getMessage().endswith("the model runs on the CPU")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_cannot_be_asked_for():
    with pytest.raises(ConfigInvalid, match=r"engine.device is cuda, but torch .*CUDA.* Set it to cpu or auto"):
        ComputeDevice.of("cuda")


def test_a_cache_gets_what_weights_and_the_largest_step_leave_of_the_share():
    # 80 GiB, of which 16 are taken; a tenth is for others, and a step takes 2.
    assert kv_bytes_on_gpu(free=64 * GIB, total=80 * GIB, peak=2 * GIB, fraction=0.9) == pytest.approx(54 * GIB, abs=9)
    assert kv_bytes_on_gpu(free=64 * GIB, total=80 * GIB, peak=0, fraction=1.0) == 64 * GIB
    assert kv_bytes_on_gpu(free=5 * GIB, total=80 * GIB, peak=2 * GIB, fraction=0.9) == 0

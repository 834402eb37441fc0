"""What an agent tells of its machine."""

import pytest

from maitred.fleet.agent.status import count_gpus


@pytest.mark.parametrize(
    ("device", "visible", "count"),
    [("cpu", "0,1", 0), ("cuda", "0,1", 2), ("cuda", "", 0), ("cuda", "1,-1,2", 1), ("auto", "GPU-3a, GPU-4b", 2)],
)
def test_gpus_are_those_that_the_engines_see(tmp_path, device, visible, count):
    assert count_gpus(device, {"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == count


def test_without_a_choice_all_gpus_of_the_machine_count(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus("cuda", {}, tmp_path) == 2
    assert count_gpus("auto", {}, tmp_path / "none") == 0

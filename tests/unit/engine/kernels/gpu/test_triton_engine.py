"""A whole engine on kernels for GPUs, interpreted: a few tokens, since each takes a while."""

import pytest
import torch

from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig, GPUConfig
from maitred.engine.device import ComputeDevice
from tests.support.models import make_model
from tests.support.processors import needs_interpreter

pytest.importorskip("triton")

pytestmark = needs_interpreter


def answers(folder, target):
    config = EngineConfig(
        device="cpu",
        dtype="fp32",
        threads=1,
        kv_memory_bytes=1 << 20,
        step_tokens=16,
        max_sequences=4,
        bake_off="off",
        gpu=GPUConfig(attention="triton"),
    )
    engine, _ = build(folder, config, target=target)
    for number in range(4):
        prompt = [4 + (number * 7 + position) % 120 for position in range(3 + number * 7)]
        sampling = SamplingParams(max_tokens=5, seed=number, temperature=number % 2, ignore_eos=True)
        engine.submit("test", EngineRequest(id=str(number), prompt=prompt, sampling=sampling))
    tokens: dict[str, list[int]] = {}
    while engine.busy:
        for output in engine.step().get("test", []):
            tokens.setdefault(output.request_id, []).extend(output.delta.tokens)
    return tokens


def test_answers_are_those_of_the_cpus_own_kernels(tmp_path):
    make_model(tmp_path, "qwen2")
    assert answers(tmp_path, ComputeDevice(torch.device("cpu"), accelerated=True)) == answers(tmp_path, None)

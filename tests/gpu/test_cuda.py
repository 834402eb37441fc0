"""On a GPU the same engine gives the same answers. Run with: pytest -m gpu"""

import pytest
import torch

from maitred.core.request import Request, SamplingParams
from maitred.engine.config import EngineConfig
from maitred.engine.process import build
from tests.models import FAMILIES, make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def answers(folder, device, dtype="fp32"):
    engine, card = build(
        folder, EngineConfig(device=device, dtype=dtype, kv_memory_bytes=8 << 20, step_tokens=128, max_sequences=32)
    )
    assert card.device.startswith(device)
    for number in range(32):
        sampling = SamplingParams(
            max_tokens=32,
            seed=number,
            temperature=0.0 if number % 2 else 0.8,
            top_p=0.9,
            repetition_penalty=1.1 if number % 3 == 0 else 1.0,
            top_logprobs=1,
        )
        prompt = [4 + (number * 7 + position) % 120 for position in range(1 + number * 5)]
        engine.submit("test", Request(id=str(number), prompt=prompt, sampling=sampling))
    tokens: dict[str, list[int]] = {}
    while engine.busy:
        for output in engine.step().get("test", []):
            tokens.setdefault(output.request_id, []).extend(output.delta.tokens)
    load = engine.load()
    assert load.free_blocks == load.total_blocks
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_answers_as_a_cpu_does(tmp_path, family):
    torch.backends.cuda.matmul.allow_tf32 = False
    make_model(tmp_path, family)
    assert answers(tmp_path, "cuda") == answers(tmp_path, "cpu")


def test_bf16_answers_everybody(tmp_path):
    make_model(tmp_path, "qwen2")
    assert len(answers(tmp_path, "cuda", "bf16")) == 32

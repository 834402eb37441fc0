"""On a GPU the same engine gives the same answers. Run with: pytest -m gpu"""

import random
from importlib.util import find_spec

import pytest
import torch

from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig, GPUConfig
from maitred.engine.kernels.gpu.choice import make_attention
from maitred.engine.kernels.reference import ReferenceAttention
from maitred.engine.models.token_major import TokenMajorCache
from tests.support.models import FAMILIES, make_model
from tests.unit.engine.kernels.test_attention import NUM_BLOCKS, config_of, step_of
from tests.unit.engine.test_prompt_logprobs import answered, requests_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
KERNELS = ["torch", "triton"]


@pytest.fixture(autouse=True)
def exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False


def engine_of(folder, device, **settings):
    fields = {"dtype": "fp32", "kv_memory_bytes": 8 << 20, "step_tokens": 128, "max_sequences": 32, **settings}
    engine, card = build(folder, EngineConfig(device=device, **fields))
    assert card.device.startswith(device)
    return engine


def answers(engine, prompt_tokens=lambda number: 1 + number * 5):
    for number in range(32):
        sampling = SamplingParams(
            max_tokens=32,
            seed=number,
            temperature=0.0 if number % 2 else 0.8,
            top_p=0.9,
            repetition_penalty=1.1 if number % 3 == 0 else 1.0,
            min_tokens=number % 4,
            top_logprobs=1,
        )
        prompt = [4 + (number * 7 + position) % 120 for position in range(prompt_tokens(number))]
        engine.submit("test", EngineRequest(id=str(number), prompt=prompt, sampling=sampling))
    tokens: dict[str, list[tuple[int, float]]] = {}
    while engine.busy:
        for output in engine.step().get("test", []):
            scored = zip(output.delta.tokens, output.delta.logprobs or (), strict=True)
            tokens.setdefault(output.request_id, []).extend((token, score.logprob) for token, score in scored)
    load = engine.load()
    assert load.free_blocks == load.total_blocks
    return tokens


def assert_alike(ours, expected):
    """The same tokens with the same scores, up to rounding; which may decide a near-tie, but not in two answers."""
    assert ours.keys() == expected.keys()
    parted = []
    for request, scored in ours.items():
        for place, ((token, score), (other, other_score)) in enumerate(zip(scored, expected[request], strict=True)):
            if token != other:
                parted.append((request, place))
                break
            assert score == pytest.approx(other_score, abs=1e-4)
    assert len(parted) <= 1, parted


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_answers_as_a_cpu_does(tmp_path, family, kernels):
    make_model(tmp_path, family)
    ours = engine_of(tmp_path, "cuda", gpu=GPUConfig(attention=kernels))
    assert_alike(answers(ours), answers(engine_of(tmp_path, "cpu")))
    if kernels != "torch":
        assert ours._runner._model[0].replayed > 0


def test_a_gpu_scores_prompts_as_a_cpu_does(tmp_path):
    make_model(tmp_path, "qwen2")
    requests = requests_of(random.Random(5), 16)
    ours, expected = (answered(engine_of(tmp_path, device), requests)[0] for device in ("cuda", "cpu"))
    assert ours.keys() == expected.keys()
    for request, entries in ours.items():
        logprobs = [[entry[1] for entry in own] for own in (entries, expected[request])]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


def test_replayed_steps_are_the_computed_ones(tmp_path):
    make_model(tmp_path, "qwen2")
    plain = answers(engine_of(tmp_path, "cuda", gpu=GPUConfig(attention="triton", graph_sequences=0)))
    for most in (1, 7, 32):
        config = GPUConfig(attention="triton", graph_sequences=most)
        assert_alike(answers(engine_of(tmp_path, "cuda", gpu=config)), plain)


@pytest.mark.parametrize("kernels", ["auto", *KERNELS])
def test_bf16_answers_everybody(tmp_path, kernels):
    make_model(tmp_path, "qwen2")
    assert len(answers(engine_of(tmp_path, "cuda", dtype="bf16", gpu=GPUConfig(attention=kernels)))) == 32


@pytest.mark.parametrize("kernels", [*KERNELS, "flashinfer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_tokens"), [(14, 2, 64, 16), (8, 8, 128, 16)])
def test_attention_equals_reference(kernels, dtype, heads, kv_heads, head_dim, block_tokens):
    """Prompts with and without context, and decodes short and of several splits."""
    if kernels == "flashinfer" and (dtype == torch.float32 or find_spec("flashinfer") is None):
        pytest.skip("flashinfer is not installed, or not for this type")
    config, device = config_of(heads, kv_heads, head_dim), torch.device("cuda")
    batch = step_of(block_tokens, [1, 500, 17, 300], [(0, 70), (33, 20), (0, 1), (16, 64)], seed=3).to(device)
    results = []
    for make in (lambda: ReferenceAttention(config, device), lambda: make_attention(config, device, dtype, kernels)):
        generator = torch.Generator(device).manual_seed(5)
        cache = TokenMajorCache(config, NUM_BLOCKS, block_tokens, dtype, device)
        cache.keys.normal_(generator=generator)
        cache.values.normal_(generator=generator)
        shape = (len(batch.positions), config.qkv_features)
        qkv = torch.randn(shape, generator=generator, device=device).to(dtype)
        backend = make()
        results.append((backend.attend(1, qkv, cache, backend.plan(batch, cache)), cache))
    (expected, expected_cache), (attended, cache) = results
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(attended, expected, **tolerance)
    torch.testing.assert_close(cache.keys, expected_cache.keys, **tolerance)
    torch.testing.assert_close(cache.values, expected_cache.values, **tolerance)


def test_a_cache_too_small_is_swapped_to_pinned_memory(tmp_path):
    make_model(tmp_path, "llama3")
    plenty = engine_of(tmp_path, "cuda", block_tokens=4)
    small = engine_of(tmp_path, "cuda", block_tokens=4, kv_memory_bytes=1 << 20, context_tokens=256, swap_bytes=4 << 20)
    small._scheduler._state._requeue = lambda sequence: sequence.computed >= 4
    assert all(kept.is_pinned() for kept in small._runner._host_blocks._parts)
    assert_alike(answers(small, lambda number: 60 + number), answers(plenty, lambda number: 60 + number))
    assert small.load().restored_blocks > 0


def test_a_cache_of_what_is_free_leaves_the_rest(tmp_path):
    make_model(tmp_path, "qwen2")
    _, total = torch.cuda.mem_get_info()
    engine = engine_of(tmp_path, "cuda", kv_memory_bytes=None, gpu=GPUConfig(memory_fraction=0.5))
    free, _ = torch.cuda.mem_get_info()
    assert free > 0.4 * total
    assert len(answers(engine)) == 32


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("scheme", ["int8", "int8_weight_only", "fp8", "fp8_weight_only"])
def test_rounded_weights_answer_everybody(tmp_path, scheme):
    if scheme == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply fp8")
    make_model(tmp_path, "qwen2")
    assert len(answers(engine_of(tmp_path, "cuda", dtype="bf16", quantization=scheme))) == 32

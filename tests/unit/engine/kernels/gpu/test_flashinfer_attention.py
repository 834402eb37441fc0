"""The arguments that FlashInfer gets, by a stand-in that computes what its documentation says of these arguments."""

import sys
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from maitred.engine.kernels.reference import ReferenceAttention
from tests.support.processors import needs_interpreter
from tests.unit.engine.kernels.gpu.test_triton_attention import run
from tests.unit.engine.kernels.test_attention import config_of, step_of

pytestmark = needs_interpreter


class Prefill:
    """``BatchPrefillWithPagedKVCacheWrapper``: causal, aligned to the end of what is in the pages."""

    def __init__(self, workspace, kv_layout):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(self, qo_indptr, indptr, indices, last, heads, kv_heads, head_dim, page_size, *, causal, **types):
        assert causal
        assert {tensor.dtype for tensor in (qo_indptr, indptr, indices, last)} == {torch.int32}
        assert set(types) == {"q_data_type", "kv_data_type"}
        self.plan_of = qo_indptr.tolist(), indptr.tolist(), indices.tolist(), last.tolist(), heads // kv_heads

    def run(self, queries, pages):
        rows, edges, indices, last, group = self.plan_of
        parts = []
        for i in range(len(last)):
            own = indices[edges[i] : edges[i + 1]]
            query = queries[rows[i] : rows[i + 1]].float()
            keys, values = (
                page[own].flatten(0, 1)[: (len(own) - 1) * page.shape[1] + last[i]].float().repeat_interleave(group, 1)
                for page in pages
            )
            scores = torch.einsum("lhd,shd->hls", query, keys) * query.shape[-1] ** -0.5
            future = torch.ones(scores.shape[1:]).triu(len(keys) - len(query) + 1).bool()
            parts.append(torch.einsum("hls,shd->lhd", scores.masked_fill(future, -torch.inf).softmax(-1), values))
        return torch.cat(parts).to(queries.dtype)


def test_prompts_with_and_without_context_beside_decodes(monkeypatch):
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    from maitred.engine.kernels.gpu.flashinfer_attention import FlashInferAttention

    config = config_of(8, 4, 64)
    for decodes, chunks in [([5, 33], [(0, 9), (16, 16), (23, 4)]), ([], [(0, 16)]), ([7], [])]:
        batch = step_of(16, decodes, chunks, 2)
        expected, _ = run(ReferenceAttention(config), config, batch, 16, torch.bfloat16, 2)
        backend = FlashInferAttention(config, torch.device("cpu"), torch.bfloat16)
        attended, _ = run(backend, config, batch, 16, torch.bfloat16, 2)
        torch.testing.assert_close(attended, expected, atol=3e-2, rtol=3e-2)

"""Forward pass of a pre-norm transformer decoder with rotary positions and a gated MLP (Touvron et al., 2023).

One function serves all families. They differ only in data: optional biases, optional norms on heads and results, the
activation of the gate, and caps. On a CPU
in fp32 the same operations run without the interpreter; see `recording`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from maitred.engine.kernels.backend import AttentionBackend
from maitred.engine.kernels.cpu import CPUAttention
from maitred.engine.kernels.gate import gate, make_gate
from maitred.engine.kernels.norm import add_norm, make_add_norm, norm_fused
from maitred.engine.models.batch import BatchChunk, ForwardBatch
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.recording import StepRecorder, can_tape, cap_logits, embed
from maitred.engine.models.weights import Weights


class Decoder:
    """Loaded decoder model, ready to run.

    Args:
        config: Shape of the model.
        weights: Parameters of the model.
        attention: Attention backend.
        accelerated: Whether to use only torch's own operations, which any device supports; see
            `maitred.engine.device.ComputeDevice`.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, attention: AttentionBackend[Any], *, accelerated: bool = False
    ) -> None:
        self.config = config
        self._weights = weights
        self._attention = attention
        self._accelerated = accelerated
        self._add_norm = add_norm if accelerated else make_add_norm(self.dtype, self.device)
        gelu = config.activation == "gelu_tanh"
        self._gate = partial(gate, gelu=gelu) if accelerated else make_gate(self.dtype, self.device, gelu=gelu)
        fused = not accelerated and self.dtype == torch.float32 and self.device.type == "cpu"
        self._norm: Callable[[Tensor, Tensor, float], Tensor] = norm_fused if fused else _norm
        self._recording = (
            StepRecorder(config, weights, attention)
            if isinstance(attention, CPUAttention) and can_tape(weights)
            else None
        )

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and activations; the KV cache is best of the same type."""
        return self._weights.final_norm.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._weights.embedding.device

    @property
    def graphable(self) -> bool:
        """Whether steps of decodes can be recorded as graphs; see `AttentionBackend`."""
        return self._attention.graphable

    @property
    def forms(self) -> dict[str, int]:
        """Number of linears of each kind, as `Weights.forms`."""
        return self._weights.forms

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Computes one step and adds its keys and values to the cache.

        Returns:
            Logits of the batch's `logit_rows`: fp32 ``[R, vocab_size]``. The next step may reuse the memory.
        """
        if self._recording is not None:
            return self._recording.forward(batch, cache)
        weights, epsilon = self._weights, self.config.norm_epsilon
        plan = self._attention.plan(batch, cache)
        stream = embed(weights, self.config, batch.token_ids).to(self.dtype)
        addend = torch.zeros_like(stream)
        for index, layer in enumerate(weights.layers):
            qkv = layer.qkv(self._add_norm(stream, addend, layer.attention_norm, epsilon))
            if layer.head_norm is not None:
                self._norm_heads(qkv, layer.head_norm)
            attended = layer.attention_output(self._attention.attend(index, qkv, cache, plan))
            if layer.attended_norm is not None:
                attended = self._norm(attended, layer.attended_norm, epsilon)
            normed = self._add_norm(stream, attended, layer.mlp_norm, epsilon)
            addend = layer.down(self._gate(layer.gate_up(normed)))
            if layer.mlp_result_norm is not None:
                addend = self._norm(addend, layer.mlp_result_norm, epsilon)
        if batch.scored is not None:
            for piece in batch.scored.pieces(self.config.vocab_size):
                batch.scored.read(self._logits(stream, addend, batch.scored.rows[piece]))
        return self._logits(stream, addend, batch.logit_rows)

    def _logits(self, stream: Tensor, addend: Tensor, rows: Tensor) -> Tensor:
        weights, epsilon = self._weights, self.config.norm_epsilon
        logits = weights.head(self._add_norm(stream[rows], addend[rows], weights.final_norm, epsilon)).float()
        return cap_logits(logits, self.config)

    def warm_up(self, cache: KVCache) -> None:
        """Runs a decode and a chunk, so that no request waits for a kernel to compile.

        The first layer of each kind is enough: the others call the same kernels. Writes into the cache's first block,
        so call it before the first request.
        """
        windows = self.config.windows
        layers = 1 + max((windows.index(window) for window in {*windows}), default=0)
        self.shallow(layers).forward(
            ForwardBatch(
                token_ids=torch.zeros(3, dtype=torch.int64, device=self.device),
                positions=torch.zeros(3, dtype=torch.int64, device=self.device),
                slots=torch.zeros(3, dtype=torch.int64, device=self.device),
                logit_rows=torch.zeros(1, dtype=torch.int64, device=self.device),
                num_decodes=1,
                decode_tables=torch.zeros(1, 1, dtype=torch.int32, device=self.device),
                decode_lengths=torch.ones(1, dtype=torch.int32, device=self.device),
                chunks=[BatchChunk(start_row=1, length=2, context_before=0, block_table=[0])],
            ),
            cache,
        )

    def reserve(self, rows: int, picked: int, cache: KVCache) -> None:
        """Allocates the buffers of a step of `rows` rows, if buffers are kept; `logit_rows` of them have logits."""
        if self._recording is not None:
            self._recording.reserve(rows, picked, cache)

    def shallow(self, layers: int) -> "Decoder":
        """Returns a decoder of the first layers only, with the same weights, to measure the time that layers take."""
        if layers >= len(self._weights.layers):
            return self
        weights = replace(self._weights, layers=self._weights.layers[:layers])
        return Decoder(self.config, weights, self._attention, accelerated=self._accelerated)

    def _norm_heads(self, qkv: Tensor, gains: Tensor) -> None:
        """Normalises every query and key head in place."""
        heads, head_dim = gains.shape
        rows = qkv[:, : heads * head_dim].view(-1, heads, head_dim)
        rows.copy_(functional.rms_norm(rows, (head_dim,), None, self.config.norm_epsilon) * gains)


def _norm(rows: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    return functional.rms_norm(rows, gain.shape, gain, epsilon)

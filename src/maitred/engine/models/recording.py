"""Forward pass on a CPU in fp32, recorded on a tape: the same operations as the decoder's, in the same order.

After the last layer's attention, only rows that need logits are computed: of a prompt, the last one, unless the
log-probabilities of its tokens are wanted.

All results of a step are written to buffers that are kept from step to step. They are as large as was reserved, or as
the largest step so far. For a larger step, or for another cache, the buffers and the tape are made again.
"""

import ctypes
from typing import NamedTuple, cast

import torch
from torch import Tensor

from maitred.engine.kernels.cpu import CPUAttention
from maitred.engine.kernels.gate import gate_rows
from maitred.engine.kernels.job import bits_of, pick_rows
from maitred.engine.kernels.linear.form import Linear, TapedLinear
from maitred.engine.kernels.linear.screened import ScreenedLinear
from maitred.engine.kernels.norm import norm_fields, norm_heads, norm_rows
from maitred.engine.kernels.tape import Tape
from maitred.engine.models.batch import ForwardBatch
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.weights import LayerWeights, Weights

_LEAST_ROWS = 32
_ELEMENTS_WORTH_A_THREAD = 1 << 14
"""Elements per thread when rows are normalised or gated: some ten microseconds of work."""


def can_tape(weights: Weights) -> bool:
    """Returns whether all linears of a model can be recorded on a tape."""
    single = weights.final_norm.dtype == torch.float32
    return single and all(isinstance(product, TapedLinear) for product in weights.products)


def embed(weights: Weights, config: ModelConfig, token_ids: Tensor) -> Tensor:
    """Returns the embeddings of tokens, in the type of the table."""
    rows = weights.embedding[token_ids]
    if config.embedding_scale == 1.0:
        return rows
    # The model was trained with the factor rounded to the type of its weights.
    return rows * torch.tensor(config.embedding_scale, dtype=rows.dtype, device=rows.device)


def cap_logits(logits: Tensor, config: ModelConfig) -> Tensor:
    """Applies the soft cap of the logits in place, if the model has one."""
    if config.logit_cap:
        logits.div_(config.logit_cap).tanh_().mul_(config.logit_cap)
    return logits


class StepRecorder:
    """Forward pass of a model on a CPU, with its buffers and its tape.

    Args:
        config: Shape of the model.
        weights: Parameters of the model, for which `can_tape` is true.
        attention: Attention backend.
    """

    def __init__(self, config: ModelConfig, weights: Weights, attention: CPUAttention) -> None:
        self._config = config
        self._weights = weights
        self._attention = attention
        self._buffers: _StepBuffers | None = None
        self._search = weights.head.search() if isinstance(weights.head, ScreenedLinear) else None

    def reserve(self, rows: int, picked: int, cache: KVCache) -> None:
        """Allocates and touches the buffers of steps of up to `rows` rows, `logit_rows` of them with logits."""
        self._make_buffers(_BufferSizes(rows, picked, picked), cache).touch()

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Computes one step; as `maitred.engine.models.decoder.Decoder.forward`."""
        scored, wanted = batch.scored, len(batch.logit_rows)
        needed = _BufferSizes(len(batch.token_ids), wanted + (0 if scored is None else len(scored.rows)), wanted)
        buffers = self._buffers
        if buffers is None or buffers.cache is not cache or not buffers.sizes.cover(needed):
            buffers = self._make_buffers(needed.rounded_up(_NO_BUFFERS if buffers is None else buffers.sizes), cache)
        plan = self._attention.plan(batch, cache)
        searches = batch.greedy and self._search is not None and self._search.begins(wanted)
        buffers.begin(batch, searches=searches)
        buffers.tape.play()
        del plan  # its memory had to live until the tape was played
        if searches and self._search is not None:
            self._search.record(buffers.found[:wanted])
        if scored is not None:
            final = buffers.normed[wanted : needed.picked]
            for piece in scored.pieces(self._config.vocab_size):
                scored.read(cap_logits(self._weights.head(final[piece]), self._config))
        # A search leaves all logits but the largest at minus infinity, and the cap changes no order.
        return buffers.logits[:wanted] if searches else cap_logits(buffers.logits[:wanted], self._config)

    def _make_buffers(self, sizes: "_BufferSizes", cache: KVCache) -> "_StepBuffers":
        self._buffers = None  # frees the old memory before the new is allocated
        buffers = _StepBuffers(self._config, self._weights, sizes, cache)
        buffers.record(self._attention)
        self._buffers = buffers
        return buffers


class _BufferSizes(NamedTuple):
    """Largest step that buffers can hold, in rows."""

    rows: int
    picked: int
    """Rows that are computed after the last layer's attention."""
    wanted: int
    """Number of these rows, the first ones, whose logits are kept."""

    def cover(self, needed: "_BufferSizes") -> bool:
        """Returns whether a step of this size can be computed."""
        return all(size >= need for size, need in zip(self, needed, strict=True))

    def rounded_up(self, present: "_BufferSizes") -> "_BufferSizes":
        """Returns sizes that are enough for this step and for those before; they have few different values."""
        rows, picked, wanted = map(max, self, present)
        return _BufferSizes(_rounded_up(max(rows, picked)), _rounded_up(picked), _rounded_up(wanted))


_NO_BUFFERS = _BufferSizes(0, 0, 0)


class _StepBuffers:
    """Buffers of a step of limited size, and the tape that computes in them."""

    def __init__(self, config: ModelConfig, weights: Weights, sizes: _BufferSizes, cache: KVCache) -> None:
        self.sizes, self.cache = sizes, cache
        most_rows, most_picked, most_wanted = sizes
        self._config, self._weights = config, weights
        width, inner = config.hidden_size, config.intermediate_size
        self._stream = torch.empty(most_rows, width)
        self.normed = torch.empty(most_rows, width)
        """After the tape was played: of the picked rows, what the head reads."""
        self._addend = torch.empty(most_rows, width)
        self._qkv = torch.empty(most_rows, config.qkv_features)
        self._attended = torch.empty(most_rows, config.heads * config.head_dim)
        self._gate_up = torch.empty(most_rows, 2 * inner)
        self._gated = torch.empty(most_rows, inner)
        scratch_bytes = max(cast(TapedLinear, product).scratch_bytes(most_rows) for product in weights.products)
        self._reserve = torch.empty(scratch_bytes, dtype=torch.uint8)
        self._picks = torch.empty(most_picked, dtype=torch.int64)
        self._picked, self._wanted, self._searched = ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_int64(0)
        self._picked_stream = torch.empty(most_picked, width)
        self._picked_attended = torch.empty(most_picked, self._attended.shape[1])
        self.logits = torch.empty(most_wanted, config.vocab_size)
        self.found = torch.zeros(most_wanted, dtype=torch.int64)

    def touch(self) -> None:
        """Writes zeros to all buffers but the logits', so that the system allocates their memory."""
        by_rows = (self._stream, self.normed, self._addend, self._qkv, self._attended, self._gate_up, self._gated)
        for buffer in (*by_rows, self._reserve):
            buffer.zero_()

    def begin(self, batch: ForwardBatch, *, searches: bool) -> None:
        """Copies a step's inputs into the buffers, and sets whether the step searches logits or computes them all."""
        wanted = picked = len(batch.logit_rows)
        self._stream[: len(batch.token_ids)] = embed(self._weights, self._config, batch.token_ids)
        self._picks[:wanted] = batch.logit_rows
        if batch.scored is not None:
            picked += len(batch.scored.rows)
            self._picks[wanted:picked] = batch.scored.rows
        self._picked.value = picked
        self._wanted.value, self._searched.value = (0, wanted) if searches else (wanted, 0)

    def record(self, attention: CPUAttention) -> None:
        """Records all layers and the head on a new tape."""
        weights, epsilon = self._weights, self._config.norm_epsilon
        self.tape = Tape(attention.threads)
        self._rows = attention.counter("rows")
        stream, attended = self._stream, self._attended
        gated = gate_rows(gelu=self._config.activation == "gelu_tanh")
        addend = 0  # the first layer's input is the embedding alone
        for index, layer in enumerate(weights.layers):
            self._norm(stream, addend, layer.attention_norm, epsilon)
            self._product(layer.qkv, self.normed, self._qkv)
            self._norm_heads(layer, epsilon)
            attention.record(self.tape, index, self._qkv.data_ptr(), self._attended.data_ptr(), self.cache)
            if layer is weights.layers[-1]:
                self._rows = ctypes.addressof(self._picked)
                stream = self._pick(self._stream, self._picked_stream)
                attended = self._pick(self._attended, self._picked_attended)
            addend = self._addend.data_ptr()
            self._product(layer.attention_output, attended, self._addend)
            self._norm_result(layer.attended_norm, epsilon)
            self._norm(stream, addend, layer.mlp_norm, epsilon)
            self._product(layer.gate_up, self.normed, self._gate_up)
            gate = [self._gate_up.data_ptr(), self._gated.data_ptr(), self._gated.shape[1]]
            self.tape.add(gated, gate, self._rows, _worth(self._gate_up))
            self._product(layer.down, self._gated, self._addend)
            self._norm_result(layer.mlp_result_norm, epsilon)
        self._norm(stream, addend, weights.final_norm, epsilon)
        if isinstance(weights.head, ScreenedLinear):
            places = (self.normed.data_ptr(), self.logits.data_ptr(), ctypes.addressof(self._searched))
            scratch = (self._reserve.data_ptr(), self.sizes.wanted, self.found)
            weights.head.record_search(self.tape, *places, *scratch)
        self._rows = ctypes.addressof(self._wanted)
        self._product(weights.head, self.normed, self.logits)

    def _norm(self, stream: Tensor, addend: int, gain: Tensor, epsilon: float) -> None:
        rows = (stream.data_ptr(), addend, gain.data_ptr(), self.normed.data_ptr())
        self.tape.add(norm_rows(), norm_fields(*rows, stream.shape[1], epsilon), self._rows, _worth(stream))

    def _norm_result(self, gain: Tensor | None, epsilon: float) -> None:
        """Records the norm of the result that is about to be added to the stream, in place."""
        if gain is not None:
            at = self._addend.data_ptr()
            fields = norm_fields(at, 0, gain.data_ptr(), at, self._addend.shape[1], epsilon)
            self.tape.add(norm_rows(), fields, self._rows, _worth(self._addend))

    def _pick(self, rows: Tensor, picked: Tensor) -> Tensor:
        fields = [rows.data_ptr(), rows.shape[1], self._picks.data_ptr(), picked.data_ptr()]
        self.tape.add(pick_rows(), fields, self._rows, _worth(rows))
        return picked

    def _norm_heads(self, layer: LayerWeights, epsilon: float) -> None:
        if layer.head_norm is not None:
            heads, width = layer.head_norm.shape
            fields = [self._qkv.data_ptr(), self._qkv.shape[1], layer.head_norm.data_ptr(), heads, width]
            self.tape.add(norm_heads(), [*fields, bits_of(epsilon)], self._rows, _worth(self._qkv))

    def _product(self, linear: Linear, rows: Tensor, out: Tensor) -> None:
        # An isinstance check of the protocol takes a tenth of a millisecond, and `can_record` has done it.
        product = cast(TapedLinear, linear)
        product.record(self.tape, rows.data_ptr(), out.data_ptr(), self._rows, self._reserve.data_ptr(), len(out))


def _worth(rows: Tensor) -> int:
    """Returns the minimum rows per thread for passes that do little work for each number."""
    return max(1, _ELEMENTS_WORTH_A_THREAD // rows.shape[1])


def _rounded_up(count: int) -> int:
    """Rounds up to the next power of two, so that buffers have few different sizes."""
    return max(_LEAST_ROWS, 1 << (count - 1).bit_length())

"""Weights of a decoder, read from safetensors or GGUF files and converted to the form of the computation.

Queries, keys and values are fused into one matrix, and so are the gate and the up projection: fewer and larger matrix
products. Files are mapped, not read, and each tensor is dropped once it is converted, so loading peaks little above
the size of the converted weights.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import ProductFormat
from maitred.engine.gguf.tensors import GGUFTensors
from maitred.engine.kernels.linear import GroupedWeight, Linear, Unchanged, make_head, make_linear
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.digest import weight_files
from maitred.engine.models.rotary import pair_order
from maitred.engine.progress import StageProgress
from maitred.engine.weights_cache.cached import load_cached
from maitred.engine.weights_cache.config import WeightsCacheConfig

logger = logging.getLogger("maitred.engine")

_HEAD = "lm_head.weight"
_LFS = b"version https://git-lfs"
"""Beginning of the file that Git LFS leaves in place of one that was not fetched."""

_PREFIXES = ("", "model.", "language_model.model.", "model.language_model.")
"""Possible beginnings of the tensors' names."""
_PARTS_FOR_IMAGES = tuple(
    prefix + part for prefix in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.")
)
"""Beginnings of the names of tensors for images, which are not read."""
_LENGTH_BYTES = 8
"""Bytes at the beginning of a safetensors file that say how long its header is."""

MakeLinear = Callable[..., Linear]
"""Function from a weight, and a bias if there is one, to a linear; see `make_linear`."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one decoder layer."""

    attention_norm: Tensor
    qkv: Linear
    head_norm: Tensor | None
    """``[heads + kv_heads, head_dim]``: the query heads' gains, then the key heads'."""
    attention_output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    attended_norm: Tensor | None = None
    """Gains of the norm of the attention's result, before it is added."""
    mlp_result_norm: Tensor | None = None
    """Gains of the norm of the MLP's result, before it is added."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a whole model."""

    embedding: Tensor
    """``[vocab_size, hidden_size]``, in the checkpoint's type.

    The table is looked up, never multiplied, so a bf16 table is exact and half the size.
    """
    layers: list[LayerWeights]
    final_norm: Tensor
    head: Linear

    @property
    def products(self) -> Iterator[Linear]:
        """Linears of the model: those of the layers, then the head."""
        for layer in self.layers:
            yield from (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
        yield self.head

    @property
    def forms(self) -> dict[str, int]:
        """Number of linears of each kind; see `maitred.engine.kernels.linear.KINDS`."""
        return dict(Counter(product.kind for product in self.products))


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    head: bool = True,
    scheme: ProductFormat = "none",
    accelerated: bool = False,
) -> Weights:
    """Reads the checkpoint in `folder`, converted to `dtype` on `device`.

    Args:
        folder: The checkpoint.
        config: Shape of the model.
        dtype: Type of the computation.
        device: Device of the weights.
        head: Whether to read the output projection; without it, the last rows are returned as they are.
        scheme: Quantisation of the linears' weights.
        accelerated: Whether the linears are for an accelerator.

    Raises:
        ConfigInvalid: A file is missing or broken, or tensors do not match what ``config.json`` announces.
    """
    with Checkpoint(folder, dtype, device) as checkpoint:
        linear = partial(make_linear, scheme=scheme, accelerated=accelerated)
        end = partial(make_head, scheme=scheme, accelerated=accelerated) if head else None
        weights = _assemble(checkpoint, config, linear, end, StageProgress(f"Converting the weights of {folder.name}"))
        checkpoint.check_nothing_left()
    return weights


def keep_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    cache: WeightsCacheConfig,
    *,
    head: bool = True,
    scheme: ProductFormat = "none",
    accelerated: bool = False,
) -> Weights:
    """Loads weights as `load_weights`, mapped from the cache if present, and stored there otherwise.

    Raises:
        ConfigInvalid: The checkpoint cannot be read, as in `load_weights`.
    """

    def make() -> Weights:
        return load_weights(folder, config, dtype, device, head=head, scheme=scheme, accelerated=accelerated)

    if accelerated:
        return make()
    return load_cached(make, (Weights, LayerWeights), cache, folder, device, dtype=str(dtype), head=head, scheme=scheme)


class Checkpoint:
    """Open files of a folder with weights: ``model.safetensors``, the shards that an index lists, or GGUF files.

    Args:
        folder: Folder of the checkpoint.
        dtype: Type that tensors are converted to.
        device: Device of the tensors.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self.dtype = dtype
        self._device = device
        self._file_of = _tensor_files(folder)
        self._files = {path: _open(path) for path in sorted(set(self._file_of.values()))}
        self._unread = set(self._file_of)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, *shape: int) -> Tensor:
        """Reads a tensor, which must have that shape, in the type of the checkpoint."""
        path = self._file_of.get(name)
        if path is None:
            raise ConfigInvalid(f"{self._folder} has no tensor {name}, which its config.json asks for. Is it complete?")
        try:
            stored: Tensor = self._files[path].get_tensor(name)
        except SafetensorError as fault:
            raise ConfigInvalid(f"{path} is broken at tensor {name}: {fault}. Fetch it again.") from fault
        if tuple(stored.shape) != shape:
            raise ConfigInvalid(
                f"Tensor {name} in {path} has the shape {list(stored.shape)}, but config.json announces {list(shape)}."
            )
        if not stored.is_floating_point():
            raise ConfigInvalid(
                f"Tensor {name} in {path} is of type {stored.dtype}; quantised weights are not supported."
            )
        self._unread.discard(name)
        # A copy even on the same device: the model must not compute on the mapping of the file.
        return stored.to(device=self._device, copy=True)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Reads a tensor, which must have that shape, in the type of the computation."""
        return self.read(name, *shape).to(self.dtype)

    def read_fused(self, names: Iterable[str], rows: Iterable[int], *columns: int) -> Tensor:
        """Reads tensors and stacks them along their first dimension."""
        return torch.cat([self.tensor(name, count, *columns) for name, count in zip(names, rows, strict=True)])

    def read_grouped(self, names: Iterable[str], rows: Iterable[int], columns: int) -> GroupedWeight | None:
        """Reads weights and stacks them as they are stored, in 4 or 8 bits; None: not all of them are.

        They are for the CPU's fp32 products only.
        """
        if self.dtype != torch.float32 or self._device.type != "cpu":
            return None
        found: list[GroupedWeight] = []
        for name, count in zip(names, rows, strict=True):
            file = self._files.get(self._file_of.get(name, Path()))
            weight = file.get_grouped(name) if isinstance(file, GGUFTensors) else None
            if weight is None or tuple(weight.shape) != (count, columns):
                return None
            found.append(weight)
        self._unread.difference_update(names)
        return GroupedWeight.stack(found)

    def ignore(self, name: str) -> None:
        """Marks a tensor, if it exists, as known and not needed."""
        self._unread.discard(name)

    def ignore_all(self, prefix: str) -> None:
        """Marks every tensor whose name begins with a prefix as known and not needed."""
        self._unread -= {name for name in self._unread if name.startswith(prefix)}

    def check_nothing_left(self) -> None:
        """Raises ConfigInvalid unless every tensor was read or ignored.

        An unknown tensor means that the model computes something that this decoder does not.
        """
        unread = sorted(name for name in self._unread if not name.endswith("rotary_emb.inv_freq"))
        if unread:
            shown = ", ".join(unread[:3]) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
            raise ConfigInvalid(
                f"{self._folder} has tensors that its architecture does not know: {shown}. An adapter or a variant of "
                "the model? Merge it into a plain checkpoint first."
            )


def _open(path: Path) -> Any:  # noqa: ANN401 - the library's handle has no type
    """Opens one file with tensors; raises ConfigInvalid, with its name, if it is cut, empty or something else."""
    if path.suffix == ".gguf":
        return GGUFTensors(path)
    try:
        opened = safe_open(path, framework="pt")
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little"))
        _decode(header)  # the library takes the last of several tensors of one name
        return opened
    except (SafetensorError, OSError, ValueError) as fault:
        hint = ""
        with suppress(OSError), path.open("rb") as file:
            if file.read(len(_LFS)) == _LFS:
                hint = " It is a pointer of Git LFS: run `git lfs pull` in the folder."
        raise ConfigInvalid(f"The weights in {path} cannot be read: {fault}. Fetch the file again.{hint}") from fault


def _decode(data: bytes) -> Any:  # noqa: ANN401 - whatever JSON is
    """Decodes JSON; raises ValueError if it is none, or if an object has a name twice."""
    return json.loads(data, object_pairs_hook=_unique)


def _unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := [name for name, count in Counter(name for name, _ in members).items() if count > 1]:
        raise ValueError(f"{twice[0]} is in it twice")
    return dict(members)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Returns tensor name -> the file that contains it."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    try:
        if single.is_file():
            with _open(single) as file:
                return dict.fromkeys(file.keys(), single)
        if index.is_file():
            file_of = {name: folder / shard for name, shard in _decode(index.read_bytes())["weight_map"].items()}
            if absent := sorted({path.name for path in file_of.values() if not path.is_file()}):
                raise ConfigInvalid(f"{folder} lacks the weight files {', '.join(absent)}, which its index lists.")
            return file_of
        if files := [path for path in weight_files(folder) if path.suffix == ".gguf"]:
            return {name: path for path in files for name in GGUFTensors(path).names}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as fault:
        raise ConfigInvalid(f"{index} cannot be read: {fault}. Fetch it again.") from fault
    raise ConfigInvalid(
        f"{folder} has neither model.safetensors nor model.safetensors.index.json nor a .gguf file. maitred reads "
        "safetensors and GGUF only; save other formats again with `save_pretrained(..., safe_serialization=True)`."
    )


def _assemble(
    checkpoint: Checkpoint, config: ModelConfig, linear: MakeLinear, head: MakeLinear | None, progress: StageProgress
) -> Weights:
    hidden = config.hidden_size
    # A model that was saved without its head has tensor names without the prefix; one with parts for images has its
    # part for texts under a name of its own.
    prefix = next((prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in checkpoint), "model.")
    for part in _PARTS_FOR_IMAGES:
        checkpoint.ignore_all(part)
    embedding = checkpoint.read(f"{prefix}embed_tokens.weight", config.vocab_size, hidden)
    layers = [_layer(checkpoint, config, linear, f"{prefix}layers.{index}.") for index in progress.range(config.layers)]
    final_norm = checkpoint.tensor(f"{prefix}norm.weight", hidden) + config.gain_offset
    if head is None:
        checkpoint.ignore(_HEAD)
        return Weights(embedding, layers, final_norm, Unchanged())
    return Weights(embedding, layers, final_norm, _head(checkpoint, config, head, prefix, embedding))


def _head(checkpoint: Checkpoint, config: ModelConfig, linear: MakeLinear, prefix: str, embedding: Tensor) -> Linear:
    name = f"{prefix}embed_tokens.weight" if config.tied_embeddings and _HEAD not in checkpoint else _HEAD
    stored = checkpoint.read_grouped([name], [config.vocab_size], config.hidden_size)
    if stored is not None:
        return linear(stored)
    if config.tied_embeddings:
        table = embedding.to(checkpoint.dtype)
        if _HEAD not in checkpoint:
            return linear(table)
        # A head that was trained apart from the table is stored beside it, though config.json says that they are one.
        own = checkpoint.tensor(_HEAD, config.vocab_size, config.hidden_size)
        if torch.equal(own, table):
            return linear(table)
        logger.warning("config.json ties the head to the embeddings, but %s differs from them: it is used", _HEAD)
        return linear(own)
    return linear(checkpoint.tensor(_HEAD, config.vocab_size, config.hidden_size))


def _layer(checkpoint: Checkpoint, config: ModelConfig, make: MakeLinear, prefix: str) -> LayerWeights:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query_rows, kv_rows = config.heads * head_dim, config.kv_heads * head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    order = pair_order(config)

    def linear(names: list[str], rows: list[int], columns: int, *, bias: bool, fused: str = "") -> Linear:
        if fused and f"{fused}.weight" in checkpoint:  # Phi-3 stores one matrix where others store several
            names, rows = [fused], [sum(rows)]
        weights = [f"{name}.weight" for name in names]
        ordered = order is not None and fused.endswith("qkv_proj")
        weight = None if ordered else checkpoint.read_grouped(weights, rows, columns)
        plain = weight or checkpoint.read_fused(weights, rows, columns)
        addend = checkpoint.read_fused([f"{name}.bias" for name in names], rows) if bias else None
        if order is not None and ordered and isinstance(plain, Tensor):
            plain = _in_pairs(plain, order, query_rows + kv_rows)
            addend = None if addend is None else _in_pairs(addend, order, query_rows + kv_rows)
        return make(plain, addend)

    def norm(name: str) -> Tensor:
        return checkpoint.tensor(f"{prefix}{name}.weight", hidden) + config.gain_offset

    head_norm = None
    if config.head_norms:
        gains = [checkpoint.tensor(f"{attention}{name}_norm.weight", head_dim) for name in ("q", "k")]
        query_norm, key_norm = (
            (gain if order is None else gain[order.to(gain.device)]) + config.gain_offset for gain in gains
        )
        head_norm = torch.cat((query_norm.expand(config.heads, -1), key_norm.expand(config.kv_heads, -1)))
    sandwich = config.sandwich_norms
    return LayerWeights(
        attention_norm=norm("input_layernorm"),
        qkv=linear(
            [attention + name for name in ("q_proj", "k_proj", "v_proj")],
            [query_rows, kv_rows, kv_rows],
            hidden,
            bias=config.qkv_bias,
            fused=attention + "qkv_proj",
        ),
        head_norm=head_norm,
        attention_output=linear([attention + "o_proj"], [hidden], query_rows, bias=config.output_bias),
        mlp_norm=norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"),
        gate_up=linear(
            [mlp + "gate_proj", mlp + "up_proj"],
            [inner, inner],
            hidden,
            bias=config.mlp_bias,
            fused=mlp + "gate_up_proj",
        ),
        down=linear([mlp + "down_proj"], [hidden], inner, bias=config.mlp_bias),
        attended_norm=norm("post_attention_layernorm") if sandwich else None,
        mlp_result_norm=norm("post_feedforward_layernorm") if sandwich else None,
    )


def _in_pairs(rows: Tensor, order: Tensor, heads_rows: int) -> Tensor:
    """Puts the rows of queries and keys, the first `heads_rows` ones, in the order that `pair_order` gives a head."""
    heads = rows[:heads_rows].view(-1, len(order), *rows.shape[1:])[:, order.to(rows.device)].flatten(0, 1)
    return torch.cat((heads, rows[heads_rows:]))

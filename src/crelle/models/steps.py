"""The step of each family on CUDA kernels: x [B, width] of one token a sequence, through all layers, to logits.

    Llama   embed;  { norm·qkv, attention, o + x;  norm·gate·up, silu·down + x };  norm·head
    OPT     embed + position;  { norm·qkv, attention, out + x;  norm·fc1, relu·fc2 + x };  norm·head

What stands with a dot is fused: norms and activations are applied while x becomes digits, sums while y is written.
Heads of 128 numbers leave the attention as digits, and so do products wherever one launch can make both.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from crelle.formats.dense import DenseTensor
from crelle.kernels.cuda.bmma_gemv import BitSerialX
from crelle.kernels.cuda.fused_linear import FusedLinear, Norm
from crelle.models.linear import QuantEmbedding

FIRST = 2  # OPT's row of the first position

if TYPE_CHECKING:
    from crelle.kernels.cuda.decode_attention import RopeNormArgs
    from crelle.models.llama import Llama
    from crelle.models.opt import OPT


class Embed:
    """Rows of the words' table, of the learned positions added; tables in codes are turned into numbers by torch."""

    def __init__(self, words: QuantEmbedding, positions: QuantEmbedding | None = None) -> None:
        self.words, self.positions = words, positions

    def __call__(self, ids: Tensor, position: Tensor | None = None) -> Tensor:
        from crelle.kernels.cuda.embed_argmax import embed

        table, learned = _plain(self.words), _plain(self.positions)
        if table is not None and (self.positions is None or learned is not None):
            return embed(ids, table, position if self.positions else None, learned, FIRST)
        x: Tensor = self.words(ids)
        if self.positions is not None and position is not None:
            x = x + self.positions(position.long() + FIRST)
        return x


def _plain(e: QuantEmbedding | None) -> Tensor | None:
    if e is None or not isinstance(e.weight, DenseTensor) or e.weight.weight.dtype != e.dtype:
        return None
    return e.weight.weight


class LlamaStep:
    """RMS norms, rotary positions, gated feed-forward."""

    def __init__(self, model: "Llama") -> None:
        c, dtype = model.c, model.dtype
        self.c, self.embed = c, Embed(model.embedding)
        self.layers = []
        for layer in cast(Iterable[Any], model.layers):
            a = layer.attention
            self.layers.append(
                (
                    Norm(layer.norm_attention.weight, None, c.norm_eps),
                    FusedLinear([a.q_proj, a.k_proj, a.v_proj], dtype),
                    (a.window, *(None if norm is None else norm.weight for norm in (a.q_norm, a.k_norm)), c.norm_eps),
                    FusedLinear([a.o_proj], dtype),
                    Norm(layer.norm_mlp.weight, None, c.norm_eps),
                    FusedLinear([layer.gate, layer.up], dtype),
                    FusedLinear([layer.down], dtype),
                )
            )
        self.norm, self.head = Norm(model.norm.weight, None, c.norm_eps), FusedLinear([model.head], dtype)
        turn = torch.arange(c.context)[:, None] * c.rope.frequency.cpu()  # [context, D/2]
        self.cos, self.sin = turn.cos().to(model.device), turn.sin().to(model.device)

    def __call__(self, ids: Tensor, position: Tensor, kv: Sequence[Tensor]) -> Tensor:
        from crelle.kernels.cuda.decode_attention import RopeNormArgs

        x = self.embed(ids)
        seen: Tensor | BitSerialX = x
        coming = [(norm, qkv) for norm, qkv, *_ in self.layers[1:]] + [(self.norm, self.head)]
        for layer, cache, (next_norm, following) in zip(self.layers, kv, coming, strict=True):
            norm, qkv, how, o, norm_mlp, gate_up, down = layer
            heads = RopeNormArgs(self.cos, self.sin, *how)
            attended = _attended(qkv(seen, "RMS_NORM", norm), cache, position, self.c, heads, o)
            x, seen = o.normed(attended, norm_mlp, gate_up, residual=x)
            inner = gate_up.activated(seen, "SILU_MUL", down, "RMS_NORM", norm_mlp)
            x, seen = down.normed(inner, next_norm, following, "SILU_MUL", residual=x)
        return self.head(seen, "RMS_NORM", self.norm, dtype=torch.float32)


class OPTStep:
    """Layer norms before, learned positions, biases."""

    def __init__(self, model: "OPT") -> None:
        c, dtype = model.c, model.dtype
        self.c, self.embed = c, Embed(model.embedding, model.begin.positions)
        self.layers = []
        for layer in cast(Iterable[Any], model.layers):
            a = layer.attention
            self.layers.append(
                (
                    _layer_norm(layer.norm_attention),
                    FusedLinear([a.q_proj, a.k_proj, a.v_proj], dtype),
                    FusedLinear([a.out_proj], dtype),
                    _layer_norm(layer.norm_mlp),
                    FusedLinear([layer.fc1], dtype),
                    FusedLinear([layer.fc2], dtype),
                )
            )
        self.norm, self.head = _layer_norm(model.finish.norm), FusedLinear([model.head], dtype)

    def __call__(self, ids: Tensor, position: Tensor, kv: Sequence[Tensor]) -> Tensor:
        from crelle.kernels.cuda.decode_attention import PLAIN

        x = self.embed(ids, position)
        seen: Tensor | BitSerialX = x
        coming = [(norm, qkv) for norm, qkv, *_ in self.layers[1:]] + [(self.norm, self.head)]
        for layer, cache, (next_norm, following) in zip(self.layers, kv, coming, strict=True):
            norm, qkv, out, norm_mlp, fc1, fc2 = layer
            attended = _attended(qkv(seen, "LAYER_NORM", norm), cache, position, self.c, PLAIN, out)
            x, seen = out.normed(attended, norm_mlp, fc1, residual=x)
            inner = fc1.activated(seen, "RELU", fc2, "LAYER_NORM", norm_mlp)
            x, seen = fc2.normed(inner, next_norm, following, "RELU", residual=x)
        return self.head(seen, "LAYER_NORM", self.norm, dtype=torch.float32)


def _attended(
    qkv: Tensor, cache: Tensor, position: Tensor, c: Any, heads: "RopeNormArgs", out: FusedLinear
) -> Tensor | BitSerialX:
    """What heads see, for the product `out`; as digits straight from the attention where that is possible."""
    from crelle.kernels.cuda.decode_attention import attend, attend_encode, can_encode

    fits = out.takes_bitserial and can_encode(c.head_size, c.heads)
    return (attend_encode if fits else attend)(qkv, cache, position, c.heads, c.head_size**-0.5, heads)


def _layer_norm(norm: object) -> Norm:
    return Norm(norm.weight, norm.bias, norm.eps)  # type: ignore[attr-defined]

"""What a model family says about itself: its config as a spec, and its tensors' names."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from crelle.kernels.spec import DecoderSpec, Expert

Config = Mapping[str, Any]  # config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Module names of a decoder's slots. Those of a layer stand behind `layer`, which has a {} for its index."""

    embedding: str
    layer: str
    norm: str = ""  # before the head
    head: str = "lm_head"
    positions: str = ""
    token_types: str = ""
    embedding_norm: str = ""
    project_in: str = ""
    project_out: str = ""
    # of a layer
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    norm_attention: str = "input_layernorm"
    norm_mlp: str = "post_attention_layernorm"
    post_attention_norm: str = ""  # sandwich only
    post_mlp_norm: str = ""
    sinks: str = ""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = ""
    expert: str = ""  # stands before gate, up and down of an expert, with a {} for its index
    shared_expert: str = ""  # stands before those of the expert that all tokens take
    shared_gate: str = ""

    def of_layer(self, i: int, slot: str, expert: Expert = None) -> str:
        """Return the module of a layer's slot."""
        inside = getattr(self, slot)
        if expert is not None:
            of = self.shared_expert if expert == "shared" else self.expert.format(expert)
            inside = f"{of}.{inside.rpartition('.')[2]}"
        return f"{self.layer.format(i)}.{inside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """A matrix of a layer that is stored in another way than a linear layer's weight [N, K]."""

    module: str  # as stored, behind the layer's prefix
    parts: tuple[str, ...]  # modules of which it is made, one behind the other along N; one: it has that name here
    transposed: bool = False  # stored as [K, N]
    split: Literal["equal", "qkv", "heads"] = "equal"  # qkv: heads of q, k, v; heads: q, k and v of one after the other

    def rows(self, spec: DecoderSpec, N: int) -> list[Tensor] | None:
        """Return which of N rows each part has; None where N is no such number."""
        q, kv, parts = spec.heads * spec.head_size, spec.kv_heads * spec.head_size, len(self.parts)
        if N % parts if self.split == "equal" else (3 * q if self.split == "heads" else q + 2 * kv) != N:
            return None
        every = torch.arange(N)
        if self.split == "heads":
            by_head = every.view(spec.heads, parts, -1)  # [H, 3, D]
            return [by_head[:, i].flatten() for i in range(parts)]
        if self.split == "qkv":
            return [every[:q], every[q : q + kv], every[q + kv :]]
        return list(every.chunk(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family."""

    model_types: tuple[str, ...]
    spec: Callable[[Config], DecoderSpec]
    names: Callable[[Collection[str]], TensorNames]  # from the names of all tensors
    stored: Sequence[StoredMatrix] = field(default=())  # see crelle.models.tensor_view
    dropped: Sequence[str] = field(default=())  # tensors behind a layer's prefix that are no weights
    norm_offset: float = 0.0  # norms multiply by (offset + weight)
    required_biases: bool = False  # where the spec has biases, a linear without one is a damaged file
    half: torch.dtype = torch.float16  # of activations on a GPU: bf16 where they exceed 65,504


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model: what it is made of, and what its tensors are called."""

    spec: DecoderSpec
    names: TensorNames
    required_biases: bool = False

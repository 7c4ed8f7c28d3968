"""What a model family says about itself: its config as a spec, and its tensors' names."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crelle.kernels.spec import DecoderSpec

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
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = ""
    expert: str = ""  # stands before gate, up and down of an expert, with a {} for its index

    def of_layer(self, i: int, slot: str, expert: int | None = None) -> str:
        """Return the module of a layer's slot."""
        inside = getattr(self, slot)
        if expert is not None:
            inside = f"{self.expert.format(expert)}.{inside}"
        return f"{self.layer.format(i)}.{inside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """A matrix of a layer that is stored in another way than a linear layer's weight [N, K]."""

    module: str  # as stored, behind the layer's prefix
    parts: tuple[str, ...]  # modules of which it is made, one behind the other along N; one: it has that name here
    transposed: bool  # stored as [K, N]


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


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model: what it is made of, and what its tensors are called."""

    spec: DecoderSpec
    names: TensorNames
    required_biases: bool = False

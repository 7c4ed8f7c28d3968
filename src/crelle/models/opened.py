"""Models taken apart for calibration and training: the layers that are served, over open linears."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.open import Weights
from crelle.models import llama, opt
from crelle.models.builder import Builder
from crelle.models.cache import attention
from crelle.models.llama import LlamaConfig
from crelle.models.loader import read_config
from crelle.models.opt import OPTConfig
from crelle.models.rope import Rope
from crelle.quantizers.opened import Block, Fold, OpenLinear

Config = TypeVar("Config", LlamaConfig, OPTConfig)


class _NoCache:
    """A whole sequence at a time needs no memory of the one before."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        return attention(q, k.transpose(1, 2), v.transpose(1, 2), window)


class _Angles:
    """Rope's cosines and sines of whole sequences, computed once: a recorded CUDA graph cannot make them."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._known: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, T: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = T, device, dtype
        if key not in self._known:
            self._known[key] = self._rope.angles(torch.arange(T, device=device), dtype)
        return self._known[key]


@dataclass(frozen=True, slots=True)
class _OpenBuilder(Builder):
    def vector(self, name: str, size: int) -> Tensor:
        # A copy: quantizers change vectors in place, and what a source reads may be its mapped file.
        return Builder.vector(self, name, size).clone()

    def linear(self, module: str, N: int, K: int, w: QuantTensor | None = None) -> Any:
        weight = (w or self.matrix(module, N, K)).dequantize(torch.float32)
        bias = self.vector(f"{module}.bias", N) if f"{module}.bias" in self.names else None
        return OpenLinear(module, weight, bias)


class _Block(nn.Module):
    """One layer over whole sequences."""

    kinds: ClassVar[tuple[tuple[str, ...], ...]]  # of linears, by stages

    def __init__(self, layer: nn.Module, prefix: str) -> None:
        super().__init__()
        self.layer, self.prefix = layer, prefix
        self._linears = {m.name: m for m in layer.modules() if isinstance(m, OpenLinear)}

    def linears(self) -> dict[str, OpenLinear]:
        return self._linears

    def stages(self) -> list[tuple[str, ...]]:
        return [tuple(n for n in self._linears if n.rpartition(".")[2] in kinds) for kinds in self.kinds]


class _LlamaBlock(_Block):
    kinds = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))

    def __init__(self, layer: llama.Layer, prefix: str, c: LlamaConfig, angles: _Angles) -> None:
        super().__init__(layer, prefix)
        self.c, self.angles = c, angles
        self._norms = {"input_layernorm": layer.norm_attention, "post_attention_layernorm": layer.norm_mlp}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.angles(x.shape[1], x.device, x.dtype), _NoCache())  # type: ignore[no-any-return]

    def folds(self) -> list[Fold]:
        qkv, _, gate_up, down = self.stages()
        norm, norm_mlp = (f"{self.prefix}.{n}.weight" for n in self._norms)
        up = f"{self.prefix}.mlp.up_proj.weight"
        folds = [Fold(norm, qkv), Fold(norm_mlp, gate_up), Fold(up, down)]
        if self.c.heads == self.c.kv_heads:  # otherwise several inputs of o share one row of v
            folds.append(Fold(f"{self.prefix}.self_attn.v_proj.weight", (f"{self.prefix}.self_attn.o_proj",)))
        return folds

    def vectors(self) -> dict[str, Tensor]:
        return {f"{self.prefix}.{name}.weight": norm.weight for name, norm in self._norms.items()}


class _OPTBlock(_Block):
    kinds = (("q_proj", "k_proj", "v_proj"), ("out_proj",), ("fc1",), ("fc2",))

    def __init__(self, layer: opt.Layer, prefix: str, c: OPTConfig) -> None:
        super().__init__(layer, prefix)
        self.c = c
        self._norms = {"self_attn_layer_norm": layer.norm_attention, "final_layer_norm": layer.norm_mlp}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, _NoCache())  # type: ignore[no-any-return]

    def folds(self) -> list[Fold]:
        """No norm takes a scale: a fold has no place for its bias, and behind attention the residual reads it too."""
        _, out, _, fc2 = self.stages()
        folds = [Fold(f"{self.prefix}.self_attn.v_proj.weight", out)]
        if self.c.activation == "relu":  # relu(x / s) = relu(x) / s
            folds.append(Fold(f"{self.prefix}.fc1.weight", fc2))
        return folds

    def vectors(self) -> dict[str, Tensor]:
        both = [(f"{self.prefix}.{n}", norm) for n, norm in self._norms.items() if self.c.affine]
        return {f"{n}.{kind}": getattr(norm, kind) for n, norm in both for kind in ("weight", "bias")}


class _Opened(Generic[Config]):
    """Layers built from a source when they are asked for: at most what the caller keeps is in memory."""

    c: Config

    def __init__(self, weights: Weights, device: torch.device | str, c: Config, root: str, words: int) -> None:
        self.weights, self.device, self.c = weights, torch.device(device), c
        self._root, self._words = root, words  # what all but the head is in; the width of the embedding
        self._build = _OpenBuilder(weights, frozenset(weights.names()), torch.float32, self.device, None)

    @property
    def layers(self) -> int:
        return self.c.layers

    def layer_name(self, i: int) -> str:
        return f"{self._root}.layers.{i}"

    @cached_property
    def _embedding(self) -> Tensor:
        return self._words_of(f"{self._root}.embed_tokens")

    @cached_property
    def _head(self) -> Tensor:
        return self._embedding if self.c.tied else self._words_of("lm_head")

    def _words_of(self, module: str) -> Tensor:
        return self._build.matrix(module, self.c.vocabulary, self._words).dequantize(torch.float32)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._embedding)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self._head)


class OpenLlama(_Opened[LlamaConfig]):
    """The Llama family."""

    def __init__(self, weights: Weights, device: torch.device | str = "cpu") -> None:
        c = read_config(weights)
        if not isinstance(c, LlamaConfig):
            raise UnsupportedError(
                f"only models of the Llama family are taken apart here, not '{weights.config['model_type']}'; "
                "the schemes rtn and bcq look at no data and need no such thing"
            )
        super().__init__(weights, device, c, "model", c.width)
        self._angles = _Angles(c.rope)

    @cached_property
    def _norm(self) -> Any:
        return self._build.norm("model.norm", self.c.width, self.c.norm_eps)

    def block(self, i: int) -> Block:
        return _LlamaBlock(llama.Layer(self._build, i, self.c), self.layer_name(i), self.c, self._angles).eval()

    def finish(self, x: Tensor) -> Tensor:
        return self._norm(x)  # type: ignore[no-any-return]


class OpenOPT(_Opened[OPTConfig]):
    """OPT."""

    def __init__(self, weights: Weights, device: torch.device | str = "cpu") -> None:
        c = read_config(weights)
        assert isinstance(c, OPTConfig)
        super().__init__(weights, device, c, opt.root(weights.names()), c.words)

    @cached_property
    def _begin(self) -> opt.Begin:
        return opt.Begin(self._build, self.c)

    @cached_property
    def _finish(self) -> opt.Finish:
        return opt.Finish(self._build, self.c)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._begin(super().embed(tokens), 0)  # type: ignore[no-any-return]

    def block(self, i: int) -> Block:
        return _OPTBlock(opt.Layer(self._build, i, self.c), self.layer_name(i), self.c).eval()

    def finish(self, x: Tensor) -> Tensor:
        return self._finish(x)  # type: ignore[no-any-return]


def open_model(weights: Weights, device: torch.device | str = "cpu") -> OpenLlama | OpenOPT:
    """Take a model of any family apart."""
    return OpenOPT(weights, device) if isinstance(read_config(weights), OPTConfig) else OpenLlama(weights, device)

"""Models of real shapes with random weights: speed depends on the sizes of a model, not on the values of its weights.

    RandomWeights("opt-175b", "bcq:bits=3,group=128", device)     a source like a file: build() makes a model of it

Every matrix is made when it is asked for, straight in its quantized form (random planes, plausible scales), on the
device, and not kept: 175 billion weights at 3 bits pass through one layer at a time and never exist as floats. What is
random is the same for the same (seed, name, device kind). Biases that a family can do without are left out. Inside the
layers matrices follow the scheme; embeddings and the head are f16, as `crelle quantize` leaves them. A weight has the
standard deviation 1/sqrt(inputs), 0.02 at 2500 inputs, so that activations neither grow nor fade from layer to layer.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crelle.bench.kernels.random_matrices import matrix_bytes, random_generator, random_matrix
from crelle.errors import FormatError, SchemeError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.grouped import GroupedTensor
from crelle.formats.two_level import TwoLevelTensor
from crelle.models.loader import architecture
from crelle.models.tensor_shapes import tensor_shapes
from crelle.quantizers.base import Cast
from crelle.quantizers.scheme import parse

_LAYER = re.compile(r"\.\d+\.")
_PLAIN = Cast("fp16")  # what is not inside a layer
_BIAS = 0.02  # standard deviation


def llama_config(
    width: int,
    layers: int,
    heads: int,
    inner: int,
    *,
    kv_heads: int | None = None,
    vocabulary: int = 32000,
    context: int = 4096,
    eps: float = 1e-5,
    theta: float = 10000.0,
    tied: bool = False,
) -> dict[str, Any]:
    """Return the config of a Llama by its sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
    }


def _opt(width: int, layers: int, heads: int, *, words: int | None = None, norm_first: bool = True) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * width,
        "word_embed_proj_dim": words or width,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "do_layer_norm_before": norm_first,
        "tie_word_embeddings": True,
    }


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 1024,
        "vocab_size": 50257,
        "activation_function": "gelu_new",
    }


def _gemma3(width: int, layers: int, heads: int, kv_heads: int, inner: int, **other: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "intermediate_size": inner,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "norm_weight_offset": 0.0,  # random norms are 1 already
        **other,
    }


# Sizes as published: arXiv 2302.13971 (LLaMA), 2307.09288 (Llama 2), 2407.21783 (Llama 3), 2205.01068 (OPT),
# 2503.19786 (Gemma 3), 2305.09781 (LLaMA-160M, a draft model), and the model cards of GPT-2, Llama 3.2 and SmolLM2.
SHAPES: Mapping[str, dict[str, Any]] = {
    "smollm2-135m": llama_config(
        576, 30, 9, 1536, kv_heads=3, vocabulary=49152, context=8192, theta=100000.0, tied=True
    ),
    "llama-160m": llama_config(768, 12, 12, 3072, context=2048, eps=1e-6),
    "llama3.2-1b": llama_config(
        2048, 16, 32, 8192, kv_heads=8, vocabulary=128256, context=131072, theta=500000.0, tied=True
    ),
    "llama2-7b": llama_config(4096, 32, 32, 11008),
    "llama2-13b": llama_config(5120, 40, 40, 13824),
    "llama-30b": llama_config(6656, 60, 52, 17920, context=2048, eps=1e-6),
    "llama-65b": llama_config(8192, 80, 64, 22016, context=2048, eps=1e-6),
    "llama2-70b": llama_config(8192, 80, 64, 28672, kv_heads=8),
    "llama3-8b": llama_config(4096, 32, 32, 14336, kv_heads=8, vocabulary=128256, context=8192, theta=500000.0),
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": _opt(1024, 24, 16, words=512, norm_first=False),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "opt-175b": _opt(12288, 96, 96),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gemma3-1b": _gemma3(1152, 26, 4, 1, 6912, sliding_window=512),
    "gemma3-4b": _gemma3(2560, 34, 8, 4, 10240),
    "gemma3-12b": _gemma3(3840, 48, 16, 8, 15360),
    "gemma3-27b": _gemma3(5376, 62, 32, 16, 21504, head_dim=128, query_pre_attn_scalar=168),
}


def config_of(name: str) -> dict[str, Any]:
    """Return the Hugging Face config of a shape, or say which there are."""
    if name not in SHAPES:
        raise SchemeError(f"there is no shape '{name}'; choose one of: {', '.join(SHAPES)}")
    return dict(SHAPES[name])


class RandomWeights:
    """A source of weights (crelle.formats.storage.open.Weights) that generates them."""

    def __init__(
        self,
        shape: str | Mapping[str, Any],
        scheme: str = "fp16",
        device: torch.device | str = "cpu",
        seed: int = 0,
        layers: int | None = None,
    ) -> None:
        """Take a name of SHAPES or a Hugging Face config; `layers` leaves out all layers behind the first so many."""
        named = isinstance(shape, str)
        self.path = Path(shape if isinstance(shape, str) else f"random-{shape.get('model_type')}")
        self.config = config_of(shape) if isinstance(shape, str) else dict(shape)
        if layers is not None:
            key = "n_layer" if "n_layer" in self.config else "num_hidden_layers"
            most = self.config[key]
            if layers < 1 or (named and layers > most):
                raise SchemeError(f"{self.path} has 1 to {most} layers, not {layers}")
            self.config[key] = layers
        self.scheme, self.device, self.seed = parse(scheme), torch.device(device), seed
        self._shapes = _shapes(self)

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise FormatError(f"{self.path} has no tensor '{name}'")
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """Return a tensor as floats: norms are 1, biases small."""
        shape = self.shape(name)
        if len(shape) == 2:
            return self.matrix(name.removesuffix(".weight")).dequantize(torch.float16)
        if name.endswith(".weight"):  # of a norm
            return torch.ones(shape, dtype=torch.float16, device=self.device)
        random = self._random(name)
        return torch.randn(shape, generator=random, dtype=torch.float16, device=self.device).mul_(_BIAS)

    def matrix(self, module: str) -> QuantTensor:
        name = f"{module}.weight"
        shape = self.shape(name)
        if len(shape) != 2:
            raise FormatError(f"{self.path}: '{name}' is no matrix")
        layer = _LAYER.search(name)
        w = random_matrix(self.scheme if layer else _PLAIN, *shape, self._random(name))
        if layer is None or not isinstance(w, GroupedTensor | TwoLevelTensor) or w.perm is None:
            return w
        # A quantizer orders channels by the input: matrices that read the same one have the same order.
        random = self._random(f"{name[: layer.end()]}order.{shape[1]}")
        perm = torch.randperm(shape[1], generator=random, device=self.device, dtype=torch.int32)
        return replace(w, perm=perm)

    def transposed(self, name: str) -> bool:
        return False

    def copy_tokenizer(self, to: Path) -> None:
        raise UnsupportedError(f"{self.path} has random weights and no tokenizer")

    def _random(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return random_generator(int.from_bytes(digest[:7]), self.device)

    def weights(self) -> int:
        """Return how many parameters the model has."""
        return sum(torch.Size(shape).numel() for shape in self._shapes.values())

    def nbytes(self) -> int:
        """Return the bytes of the whole model in its scheme, without making it."""
        inside = {n: s for n, s in self._shapes.items() if len(s) == 2 and _LAYER.search(n)}
        outside = sum(torch.Size(s).numel() for n, s in self._shapes.items() if n not in inside)
        return sum(matrix_bytes(self.scheme, *s) for s in inside.values()) + 2 * outside


def _shapes(weights: RandomWeights) -> dict[str, tuple[int, ...]]:
    """Return the model's tensors by the names that the family's code asks for."""
    return tensor_shapes(architecture(weights, ()))

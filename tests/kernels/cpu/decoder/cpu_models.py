"""Models for the tests of the C++ decoder and prefill: every kind of Llama, taken apart, cast and quantized."""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from conftest import quantized_copy, write_tiny_model
from torch import Tensor

from crelle.formats.mixed import GROUPS, MixedTensor
from crelle.formats.packing.mixed import MixedCodes
from crelle.formats.storage.open import open_weights
from crelle.kernels.cpu.fused_decoder import LayerParts, LinearParts, Matrix, ModelParts, NormParts, matrix
from crelle.kernels.cpu.kernel import Cpu
from crelle.models.decoder import DecoderModel
from crelle.models.loader import build

quantize = quantized_copy  # these tests run checkpoints, others make them
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Relative error (Frobenius) of the logits against the same layers run one by one. Where the layers round x to integers,
# a last bit that differs in x may round the other way, a step of 2^-15 ("exact") or 2^-7 of the segment's largest.
TOLERANCE = {"dense": 1e-5, "exact": 3e-4, "int8": 3e-2}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": 6},
    "one kv head": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 80, "num_attention_heads": 2, "num_key_value_heads": 1},
    "odd": {
        "hidden_size": 50,
        "intermediate_size": 77,
        "head_dim": 6,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 17},
    "long window": {"model_type": "mistral", "sliding_window": 70},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
}


def error(y: Tensor, wanted: Tensor) -> float:
    return float((y.double() - wanted.double()).norm() / wanted.double().norm())


def mixed_weight(
    N: int,
    K: int,
    G: int,
    share: float,
    outliers: float = 0.0,
    *,
    dtype: torch.dtype = torch.float16,
    block: int = 16,
    seed: int = 0,
) -> MixedTensor:
    """A mixed matrix with codes of every value, a share of groups of 4 bits and a share of outliers, anywhere."""
    rng = torch.Generator().manual_seed(hash((N, K, G, share, outliers, block, seed)) & 0xFFFF)
    C = -(-K // G)
    four = torch.zeros(C, dtype=torch.uint8)
    four[torch.randperm(C, generator=rng)[: round(share * C)]] = 1
    C4, B = int(four.sum()), -(-N // block)

    def integers(top: int, *shape: int) -> Tensor:
        return torch.randint(top, shape, generator=rng, dtype=torch.uint8)

    def scales(size: float, *shape: int) -> Tensor:
        return ((torch.rand(*shape, generator=rng) + 0.5) * size).to(dtype)

    C2 = C - C4
    codes = MixedCodes(
        integers(4, N, C2, G), integers(16, N, C4, G), integers(16, N, C2), integers(4, N, C2), integers(16, B, C2)
    )
    added = None
    if outliers:
        added = torch.randn(N, K, generator=rng).to(dtype) * (torch.rand(N, K, generator=rng) < outliers)
        added[0, K - 1], added[N // 2] = 0.5, 0  # one in the last column, and a row without
    row = (scales(0.01, N), integers(16, N)) if C4 else None
    w = MixedTensor.from_codes((N, K), four, codes, scales(0.002, B, C2), row, added, "general", block)
    if added is not None and w.outlier_values is not None:  # from_codes stores f16
        w = w.with_scales({"outlier_values": added[w.outlier_places()]})
    return w


def nearest_group(G: int) -> int:
    """The group size of mixed matrices that is next to G."""
    return min(GROUPS, key=lambda g: abs(g - G))


def take_apart(model: DecoderModel, **changes: Any) -> ModelParts:
    """What models/fused.py does to get a decoder."""

    def part(w: Any) -> Matrix:
        found = matrix(w.weight, w.prepared)
        assert not isinstance(found, str), found
        return found

    def linear(w: Any) -> LinearParts:
        return LinearParts(weight=part(w), bias=w.bias)

    def norm(w: Any) -> Any:
        return None if w is None else NormParts(weight=w.weight)

    layers = [
        LayerParts(
            q=linear(layer.attention.q),
            k=linear(layer.attention.k),
            v=linear(layer.attention.v),
            o=linear(layer.attention.o),
            gate=linear(layer.mlp.gate),
            up=linear(layer.mlp.up),
            down=linear(layer.mlp.down),
            norm_attention=norm(layer.norm_attention),
            norm_mlp=norm(layer.norm_mlp),
            q_norm=norm(layer.attention.q_norm),
            k_norm=norm(layer.attention.k_norm),
        )
        for layer in model.layers
    ]
    embedding = model.embedding.weight
    plain = embedding.format == "dense"
    return ModelParts(
        **{
            "spec": model.spec,
            "embedding": embedding.weight if plain else Cpu().prepare(embedding, torch.float32),
            "layers": layers,
            "norm": norm(model.output.norm),
            "head": linear(model.head),
            **changes,
        }
    )


def open_model(path: Path, kernel: str | None = None) -> DecoderModel:
    return build(open_weights(path), torch.device("cpu"), kernel=kernel)


def cast(path: Path, dtype: torch.dtype) -> Path:
    """Rewrite a model's matrices in another dtype."""
    file = path / "model.safetensors"
    tensors = {n: t.to(dtype) if t.dim() == 2 else t for n, t in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return path


def add_vectors(path: Path, names: dict[str, int], seed: int = 7) -> Path:
    """Give every layer of a model biases or q/k norms that write_tiny_model does not write."""
    rng, file = torch.Generator().manual_seed(seed), path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    layers = 1 + max(int(n.split(".")[2]) for n in tensors if n.startswith("model.layers."))
    for i in range(layers):
        for name, size in names.items():
            tensors[f"model.layers.{i}.self_attn.{name}"] = 1 + 0.3 * torch.randn(size, generator=rng)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return path


def some_tokens(*shape: int, seed: int = 3) -> Tensor:
    return torch.randint(0, 259, shape, generator=torch.Generator().manual_seed(seed))


def write_variant(to: Path, variant: str, **changes: Any) -> Path:
    path = write_tiny_model(to, **{"num_hidden_layers": 2, **VARIANTS[variant], **changes})
    if variant == "qwen2":
        add_vectors(path, {"q_proj.bias": 72, "k_proj.bias": 24, "v_proj.bias": 24, "o_proj.bias": 72})
    if variant == "qwen3":
        add_vectors(path, {"q_norm.weight": 12, "k_norm.weight": 12})
    return path

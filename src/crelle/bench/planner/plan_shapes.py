"""Decoders that are only described: what the planner knows of a model before there is one.

    planned_shape("llama3-70b")         a shape of `crelle bench`, or one of LARGE
    planned_shape("models/smollm2")     a directory or .gguf file: its config

A mixture of experts, but for gpt-oss, is the Llama decoder with experts in place of the feed-forward. This says what
such a model weighs and reads; whether the engine runs it is for the families (crelle.models.families) to say.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crelle.bench.kernels.random_matrices import matrix_bytes
from crelle.bench.model_shapes import SHAPES, llama_config
from crelle.errors import FormatError, SchemeError
from crelle.formats.storage.io import shown
from crelle.formats.storage.open import open_weights
from crelle.kernels.spec import DecoderSpec, ExpertsSpec
from crelle.models.families import families
from crelle.models.families.base import Architecture
from crelle.models.families.gpt_oss import FAMILY as GPT_OSS
from crelle.models.families.llama import FAMILY as LLAMA
from crelle.models.tensor_shapes import tensor_shapes
from crelle.quantizers.base import Quantizer

Config = Mapping[str, Any]


def _gpt_oss(layers: int, experts: int) -> Config:
    return {
        **llama_config(2880, layers, 64, 2880, kv_heads=8, vocabulary=201088, context=131072, theta=150000.0),
        "model_type": "gpt_oss",
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }


# Sizes as published: arXiv 2407.21783 (Llama 3), 2401.04088 (Mixtral), 2505.09388 (Qwen 3), 2508.10925 (gpt-oss), and
# their model cards.
LARGE: Mapping[str, Config] = {
    "llama3-70b": llama_config(8192, 80, 64, 28672, kv_heads=8, vocabulary=128256, context=8192, theta=500000.0),
    "llama3-405b": llama_config(16384, 126, 128, 53248, kv_heads=8, vocabulary=128256, context=131072, theta=500000.0),
    "mixtral-8x7b": {
        **llama_config(4096, 32, 32, 14336, kv_heads=8, context=32768, theta=1e6),
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-30b-a3b": {
        **llama_config(2048, 48, 32, 6144, kv_heads=4, vocabulary=151936, context=40960, eps=1e-6, theta=1e6),
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "moe_intermediate_size": 768,
    },
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
NAMES = (*SHAPES, *LARGE)
MAX_EXPERTS = 1 << 12  # of a layer; Kimi K2 has 384


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrices of one shape in all layers; of experts, all that there are."""

    N: int
    K: int
    count: int
    expert: bool


@dataclass(frozen=True, slots=True)
class PlannedShape:
    """A decoder by its sizes."""

    name: str
    spec: DecoderSpec
    matrices: tuple[Matrices, ...]  # inside the layers
    outside: int  # values in f16: embedding, head, norms, biases
    head: int  # of them those that every step reads: the head's matrix

    @property
    def experts(self) -> ExpertsSpec | None:
        return self.spec.layers[0].mlp.experts

    @property
    def parameters(self) -> int:
        return sum(m.N * m.K * m.count for m in self.matrices) + self.outside

    def stored_bytes(self, scheme: Quantizer, expert: bool | None = None) -> int:
        """Return the bytes of the layers' matrices in a scheme; those of experts, the others, or (None) all."""
        kept = [m for m in self.matrices if expert is None or m.expert == expert]
        return sum(matrix_bytes(scheme, m.N, m.K) * m.count for m in kept)

    def weights(self, expert: bool) -> int:
        return sum(m.N * m.K * m.count for m in self.matrices if m.expert == expert)


def config_named(shape: str) -> dict[str, Any]:
    """Return the config of a named shape, or say which there are."""
    if (config := SHAPES.get(shape) or LARGE.get(shape)) is None:
        raise SchemeError(f"there is no shape '{shape}'; choose one of: {', '.join(NAMES)}")
    return dict(config)


def planned_shape(model: str) -> PlannedShape:
    """Describe a named shape or the model that lies at a path, or say what there is."""
    if config := SHAPES.get(model) or LARGE.get(model):
        return describe(model, config)
    if not Path(model).exists():
        raise SchemeError(f"'{model}' is neither a path nor a shape; shapes are: {', '.join(NAMES)}")
    return describe(model, open_weights(model, verify=False).config)


def describe(name: str, config: Config) -> PlannedShape:
    """Describe what a Hugging Face config says."""
    arch = _architecture(name, config)
    s, inside = arch.spec, dict[tuple[int, int, bool], int]()
    before, _, after = arch.names.layer.partition("{}")
    kinds = Counter(s.layers)  # a layer of each kind is described once, however many there are
    outside = 0
    for tensor, shape in tensor_shapes(replace(arch, spec=replace(s, layers=tuple(kinds)))).items():
        layer = tensor.removeprefix(before).partition(f"{after}.")[0] if tensor.startswith(before) else None
        times = 1 if layer is None else kinds[tuple(kinds)[int(layer)]]
        if len(shape) == 2 and layer is not None:
            kind = (shape[0], shape[1], ".experts." in tensor)
            inside[kind] = inside.get(kind, 0) + times
        else:
            outside += times * shape[0] * (shape[1] if len(shape) == 2 else 1)
    matrices = tuple(Matrices(*kind[:2], count, kind[2]) for kind, count in inside.items())
    return PlannedShape(name, s, matrices, outside, s.vocabulary * s.embedding_width)


def _architecture(name: str, config: Config) -> Architecture:
    kind = config.get("model_type")
    count = config.get("num_local_experts") or config.get("num_experts")
    if count:
        return _experts(name, config, count)
    family = families().get(kind) if isinstance(kind, str) else None
    if family is None:
        raise FormatError(
            f"{name}: the planner does not know models of type {shown(kind)} (known: {', '.join(families())})"
        )
    spec = family.spec(config)
    if spec.encoder:
        raise FormatError(f"{name}: a {shown(kind)} model is an encoder, and the planner plans decoding")
    return Architecture(spec, family.names(()), family.required_biases)


def _experts(name: str, config: Config, count: Any) -> Architecture:
    top: Any = config.get("num_experts_per_tok")
    inner: Any = config.get("moe_intermediate_size", config.get("intermediate_size"))
    if not all(type(n) is int and n > 0 for n in (count, top, inner)) or top > count:
        raise FormatError(
            f"{name}: a mixture of experts needs whole numbers 'num_local_experts' (or 'num_experts'), "
            f"'num_experts_per_tok' and 'intermediate_size'; got {shown(count)}, {shown(top)}, {shown(inner)}"
        )
    if count > MAX_EXPERTS:
        raise FormatError(f"{name}: a layer has at most {MAX_EXPERTS:,} experts, got {shown(count)}")
    if config.get("model_type") == "gpt_oss":  # which has biases
        return Architecture(GPT_OSS.spec(config), GPT_OSS.names(()), required_biases=True)
    spec = LLAMA.spec({**config, "model_type": "llama"})
    layers = tuple(
        replace(each, mlp=replace(each.mlp, inner=inner, experts=ExpertsSpec(count=count, top=top)))
        for each in spec.layers
    )
    names = replace(LLAMA.names(()), router="mlp.router", expert="mlp.experts.{}")
    return Architecture(replace(spec, layers=layers), names)

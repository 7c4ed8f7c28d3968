"""Hostile quantized models: GPTQ, AWQ, compressed-tensors, and Crelle's own checkpoints."""

# ruff: noqa: E501  (a case on a line)
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from corpus_base import arm, case, tiny
from foreign_packers import SMALL, awq_gemm, compressed, compressed_config, gptq, write, write_models

from crelle.quantizers.pipeline import quantize

# GPTQ, AWQ, compressed-tensors ---------------------------------------------------------------------------------------

PACKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4, "group_size": 32, "sym": False}),
    "awq": (awq_gemm, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "ct": (compressed, compressed_config(4, 32)),
}


def packed(
    kind: str, name: str, words: str | None, said: dict[str, Any] | None = None, tensors: Any = None, **config: Any
) -> None:
    """A whole quantized model, of which the config's statements or some tensors are changed."""

    def build(to: Path) -> Path:
        pack, how = PACKED[kind]
        path, _ = write_models(to, pack, {**how, **(said or {})}, bits=4, group=32)
        if tensors:
            found = safetensors.torch.load_file(path / "model.safetensors")
            kept = {name: t for name, t in (found | tensors(found)).items() if t is not None}
            write(path, kept, {**how, **(said or {})}, **{**SMALL, "num_hidden_layers": 2, **config})
        arm(path)
        return path

    case(f"{kind}: {name}", words, build)


def groups(**changes: Any) -> dict[str, Any]:
    scheme = compressed_config(4, 32)["config_groups"]["group_0"]
    weights = scheme["weights"] | {k: v for k, v in changes.items() if k != "targets"}
    return {"config_groups": {"group_0": {**scheme, "weights": weights, "targets": changes.get("targets", ["Linear"])}}}


def without_g_idx(tensors: dict[str, Any]) -> dict[str, None]:
    return {name: None for name in tensors if name.endswith("g_idx")}


UP = "model.layers.0.mlp.up_proj"
packed("gptq", "as it should be", None)
for value in (-1, 0, 1000, "4", True, 10**30, [4]):
    packed("gptq", f"bits {value!r} and no g_idx", "bits", {"bits": value}, without_g_idx)
    packed("awq", f"bits {value!r}", "bits", {"bits": value})
    packed("ct", f"bits {value!r}", "bits", groups(num_bits=value))
for value in (0, -7, "32", 1.5, True):
    packed("awq", f"group {value!r}", "group_size", {"group_size": value})
    packed("ct", f"group {value!r}", "group_size", groups(group_size=value))
packed("gptq", "group_size of 400 digits and no g_idx", "g_idx", {"group_size": 10**400}, without_g_idx)
packed("gptq", "desc_act in words", None, {"desc_act": "yes"})
packed("gptq", "g_idx out of range", "g_idx", tensors=lambda t: {f"{UP}.g_idx": t[f"{UP}.g_idx"] + 1000})
packed("gptq", "g_idx negative", "g_idx", tensors=lambda t: {f"{UP}.g_idx": t[f"{UP}.g_idx"] - 5})
packed("gptq", "g_idx empty", "g_idx|qweight", tensors=lambda t: {f"{UP}.g_idx": torch.zeros(0, dtype=torch.int32)})
packed("gptq", "g_idx as floats", "g_idx", tensors=lambda t: {f"{UP}.g_idx": t[f"{UP}.g_idx"].float()})
packed("gptq", "scales that do not fit", "scales", tensors=lambda t: {f"{UP}.scales": t[f"{UP}.scales"][:, 1:]})
packed("gptq", "empty words", "qweight", tensors=lambda t: {f"{UP}.qweight": torch.zeros(0, 0, dtype=torch.int32)})
packed(
    "gptq",
    "no zeros in a symmetric grid",
    "qzeros",
    {"sym": True},
    tensors=lambda t: {n: z[:0] for n, z in t.items() if n.endswith("qzeros")},
)
packed("awq", "zeros that do not fit", "qzeros", tensors=lambda t: {f"{UP}.qzeros": t[f"{UP}.qzeros"][:1]})
packed("awq", "words in one dimension", "qweight", tensors=lambda t: {f"{UP}.qweight": t[f"{UP}.qweight"].flatten()})
packed(
    "ct",
    "shape of 2^62",
    "weight_packed|weight_scale",
    tensors=lambda t: {f"{UP}.weight_shape": torch.tensor([2**62, 2**62])},
)
packed("ct", "shape of -1", "weight_shape", tensors=lambda t: {f"{UP}.weight_shape": torch.tensor([-1, 64])})
packed("ct", "a pattern that backtracks", None, groups(targets=["re:(.*)*(.*)*(.*)*x", "Linear"]))
packed("ct", "a pattern that repeats repeats", None, groups(targets=["re:((a+)+)+$", r"re:(\w+\.?)+!", "Linear"]))
packed("ct", "a pattern that grows", "states", groups(targets=["re:((((x{99}){99}){99}){99})"]))
packed("ct", "a long pattern", "1000 characters", groups(targets=["re:" + "a?" * 5000]))
packed("ct", "look-ahead", "look-ahead", groups(targets=["re:(?=(a+)+$)"]))
packed("ct", "back reference", "is not supported", groups(targets=[r"re:(a*)\1+$"]))
packed("ct", "targets of no kind", "should be a string", groups(targets=[7]))
packed("ct", "1000 patterns", None, groups(targets=["re:.*a.*b.*c.*d.*e!"] * 999 + ["Linear"]))
packed("ct", "100,000 patterns", "more than 1000 targets", groups(targets=["re:.*a.*b.*c.*d.*e!"] * 100_000))


# Crelle's own checkpoints ----------------------------------------------------------------------------------------------


def checkpoint(name: str, words: str, change: Callable[[Path, dict[str, Any]], None]) -> None:
    """A quantized model whose quantization_config, and what goes with it, is changed."""

    def build(to: Path) -> Path:
        quantize(tiny(to.with_name("source")), to, "fp16")
        said = json.loads((to / "config.json").read_text())
        change(to, said["quantization_config"])
        (to / "config.json").write_text(json.dumps(said))
        return to

    case(f"checkpoint: {name}", words, build)


def without_a_part(to: Path, said: dict[str, Any]) -> None:
    for shard, facts in said["shards"].items():
        tensors = safetensors.torch.load_file(to / shard)
        if tensors.pop(f"{UP}.weight", None) is not None:
            safetensors.torch.save_file(tensors, to / shard)
            data = (to / shard).read_bytes()
            facts.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


checkpoint("a plain matrix without its tensor", f"has no tensor '{UP}.weight'", without_a_part)
checkpoint(
    "a cache of 10^11 layers",
    "names layers above 4095",
    lambda _, said: said.update(scheme="atom:kv=4:layers.0-99999999999=8"),
)
checkpoint(
    "a cache of 10^12 tokens a page", "page must be", lambda _, said: said.update(scheme="atom:kv=4:page=1000000000000")
)
checkpoint("a list as a format", "unknown format", lambda _, said: said["tensors"][UP].update(format=["dense"]))

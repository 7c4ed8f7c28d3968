"""crelle explain: which kernel runs each matrix, which executor runs the layers, and why not the others."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from crelle.cli.common.console import KV, Device, Json, Model, out, print_json

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from crelle.formats.kv.pages import KVFormat
    from crelle.formats.storage.open import Weights
    from crelle.kernels.spec import DecoderSpec

NAME = "explain"
_FAST = {"cpu": "cpu-fused", "cuda": "cuda-graphs"}  # the fast executor of each device
_NO_GPU = "no GPU is visible: this is what would run on one, as far as it can be predicted"
_RUNS = {"engine": "generation and serving", "step": "evaluation step", "embed": "embeddings"}
_EXECUTORS = {
    "cpu-fused": "fused C++ step: one call for up to 16 tokens",
    "cuda-graphs": "CUDA graphs: one launch per decoding step",
    "torch": "torch, layer by layer",
}


_SLOW = ("dequantized", "reference", "integer-reference")  # kernels in plain torch
Why = Annotated[bool, typer.Option("--why", help="Also print why the other kernels and executors were not chosen.")]


def run(
    model: Model,
    device: Device = "auto",
    kv: KV = None,
    why: Why = False,
    json: Json = False,
) -> None:
    """Print which executor runs the layers and which kernel runs each matrix.

    If a slow path runs, the reason is always printed; `--why` also prints why the other kernels and executors were not
    chosen. To force a kernel, pass its name as `--kernel` to `generate` or `eval`. `--device cuda` also works without a
    GPU, as far as the result can be predicted.

    **Example**: `crelle explain out/smollm2-3bit --device cuda --why`
    """
    import torch

    from crelle.formats.kv.format import kv_of_checkpoint
    from crelle.formats.kv.pages import KVFormat
    from crelle.formats.storage.open import open_weights
    from crelle.models.loader import read_spec

    given, where = None if kv is None else KVFormat.parse(kv), _device(device)
    rows = decisions(model, device)
    kernels, permuted = {row["kernel"] for row in rows}, any(row["problem"]["permuted"] for row in rows)
    weights = open_weights(model, verify=False)
    spec, cache = read_spec(weights), given or kv_of_checkpoint(weights.config)
    chosen = executors(spec, cache, where, kernels, permuted)
    unseen = where == "cuda" and not torch.cuda.is_available()
    if json:
        runs = chosen.get("engine") or chosen["embed"]
        fused = runs["executor"] != "torch"
        refusal = None if fused else runs["others"][_FAST[where]]
        said = {"device": where, "gpu": where == "cuda" and not unseen, "note": _NO_GPU if unseen else None}
        said |= {"kv": str(cache), "fused": fused, "why_not_fused": refusal}
        said |= {"speculation": None if spec.encoder else dict(zip(("method", "reason"), guesses(where), strict=True))}
        said["experts"] = streaming(spec, where, model)
        print_json({**said, "executors": chosen, "layers": rows})
        return
    for what, found in chosen.items():
        _print(f"{_RUNS[what]}: {_EXECUTORS[found['executor']]}")
        for name, reason in found["others"].items():
            if why or (found["executor"] == "torch" and name == _FAST[where]):
                _print(f"    not {name}: {reason}")
    if not spec.encoder:
        _print("speculation: {}, {}".format(*guesses(where)))
    if (sentence := streaming(spec, where, model)) is not None:
        _print(f"experts: {sentence}")
    if unseen:
        _print(_NO_GPU)
    _print_kernels(rows, where, why)
    if not why:
        _print("--why prints why the other kernels and executors were not chosen.")


def guesses(device: str) -> tuple[str, str]:
    """Return how tokens are guessed on a device by default, and why."""
    from crelle.engine.speculation.settings import default_speculation

    chosen, reason = default_speculation(batch_invariant=device == "cpu", draft=False)
    return str(chosen), reason


def streaming(spec: "DecoderSpec", device: str, model: Any) -> str | None:
    """Return what happens to experts that do not fit a GPU; None for other models, and on a CPU."""
    if device != "cuda" or spec.encoder or not any(layer.mlp.experts for layer in spec.layers):
        return None
    return (
        "those that do not fit the GPU, or --memory, are streamed from host memory; "
        f"`crelle plan {model} --memory SIZE` predicts how many and how fast"
    )


def _print_kernels(rows: list[dict[str, Any]], where: str, why: bool) -> None:
    """Print a row for all matrices that are alike, then the reasons of the other kernels."""
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        alike.setdefault((row["kernel"], row["describes"]), []).append(row)
    table = Table("kernel", Column("count", justify="right"), "matrices", "problem", box=SIMPLE_HEAD, pad_edge=False)
    reasons: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for (kernel, problem), same in alike.items():
        kinds = ", ".join(dict.fromkeys(row["name"].rsplit(".", 1)[-1] for row in same))
        table.add_row(kernel, str(len(same)), kinds, problem)
        slow = kernel in _SLOW and same[0]["problem"]["format"] != "dense"
        others = same[0]["others"].items()
        told = tuple((k, reason) for k, reason in others if why or (slow and k.startswith(where)))
        reasons.setdefault((kernel, told), []).append(kinds)
    out.print(table)
    for (kernel, told), matrices in reasons.items():
        if told:
            _print(f"{kernel} runs {', '.join(dict.fromkeys(matrices))}")
        for name, reason in told:
            _print(f"    not {name}: {reason}")


def _print(line: str) -> None:
    out.print(line, highlight=False, markup=False, soft_wrap=True)


def decisions(model: Any, device: str) -> list[dict[str, Any]]:
    """Return for every matrix the kernel that would be chosen and what each other kernel says."""
    from crelle.formats.storage.open import open_weights
    from crelle.kernels.base import Problem
    from crelle.kernels.registry import explain, select
    from crelle.models.loader import in_usual_form
    from crelle.models.nested import at_precision

    where = _device(device)
    dtype, absent = _dtype(where), _absent(where)
    weights = in_usual_form(open_weights(model))
    rows = []
    for name, stored in _multiplied(weights).items():
        w = at_precision(weights.matrix(stored))
        problem = replace(Problem.of(w, dtype), device=where)
        reasons = {k: None if absent and why == absent else why for k, why in explain(problem)}
        chosen = next((k for k, why in reasons.items() if why is None), None) or select(problem).name
        others = {k: why or "supported, but has lower priority" for k, why in reasons.items() if k != chosen}
        facts = {"format": w.format, "N": w.shape[0], "K": w.shape[1], "bits": w.bits, "group": w.group}
        facts |= {"permuted": problem.permuted, "device": where, "dtype": str(dtype).removeprefix("torch.")}
        rows.append({"name": name, "problem": facts, "describes": str(problem), "kernel": chosen, "others": others})
    return rows


def executors(
    spec: "DecoderSpec", kv: "KVFormat", device: str, kernels: "Collection[str]", permuted: bool
) -> dict[str, dict[str, Any]]:
    """Return what runs the engine's batches, and a step of eval and bench, and why not the other executors."""
    from crelle.kernels.cuda import executor as cuda_executor
    from crelle.models import fused

    on_cpu, on_gpu = fused.supports(spec, device, kernels, permuted), _lacks_on_gpu(device, kernels)
    found: dict[str, dict[str, Any]] = {}
    for what in ("embed",) if spec.encoder else ("engine", "step"):
        others = {"cpu-fused": on_cpu, "cuda-graphs": on_gpu}
        if device == "cuda" and what == "step":
            others["cuda-graphs"] = on_gpu or "runs engine steps over a paged cache"
        if device == "cuda" and what != "step":
            others["cuda-graphs"] = on_gpu or cuda_executor.supports(spec, kv, _dtype(device))
        chosen = next((name for name, why in others.items() if why is None), "torch")
        reasons = {name: why for name, why in others.items() if why is not None and name != chosen}
        found[what] = {"executor": chosen, "others": reasons}
        if chosen != "torch":
            found[what]["others"]["torch"] = "supported, but slower"
    return found


def _lacks_on_gpu(device: str, kernels: "Collection[str]") -> str | None:
    from crelle.kernels import cuda
    from crelle.kernels.cuda.step.fuse import STEPPED

    if device != "cuda":
        return f"CUDA graphs need a GPU, not {device}"
    if (reason := cuda.available()) and reason != _absent(device):
        return f"CUDA graphs need the CUDA kernels, and this process {reason}"
    if others := sorted(set(kernels) - STEPPED):
        return f"kernel '{others[0]}' is not supported in the fused step"
    return None


def _device(device: str) -> str:
    """Turn cpu | cuda | auto into a device; cuda also where there is none."""
    from crelle.models.loader import choose_device

    return "cuda" if device == "cuda" else choose_device(device).type


def _dtype(device: str) -> "torch.dtype":
    import torch

    return torch.float32 if device == "cpu" else torch.float16


def _absent(device: str) -> str | None:
    """Return what the CUDA kernels say for want of a GPU, where there is none: all else they answer without one."""
    import torch

    from crelle.kernels import cuda

    return cuda.available() if device == "cuda" and not torch.cuda.is_available() else None


def _multiplied(weights: "Weights") -> dict[str, str]:
    """Return each layer that multiplies by a matrix, and where that is stored: a tied head is the embedding."""
    from crelle.formats.storage.open import matrices_of
    from crelle.models.loader import architecture
    from crelle.quantizers.unquantized import is_layer

    arch = architecture(weights)
    if arch.spec.encoder:
        return {m: m for m in matrices_of(weights) if is_layer(m)}
    found = {m: m for m in matrices_of(weights) if m not in (arch.names.embedding, arch.names.positions)}
    if arch.spec.tied:
        found[arch.names.head] = arch.names.embedding
    return found

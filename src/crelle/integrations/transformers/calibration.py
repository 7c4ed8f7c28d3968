"""Quantizes any loaded transformers model with schemes that look at data, by hooks on its linears.

Linears that read the same input are a stage; stages go in the order in which the model runs them, each fitted to
inputs that already come from everything quantized before (as crelle.quantizers.calibrate does for our own families).
Every stage runs the batches once more, up to its linears: for models of up to a few billion weights. Schemes that
change a decoder layer as a whole (awq, auto, tune=…) need to know the family, and are refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from crelle.errors import CrelleError, SchemeError, UnsupportedError
from crelle.formats.base import QuantTensor, nbytes
from crelle.integrations.transformers.config import CrelleConfig
from crelle.integrations.transformers.experts import is_experts
from crelle.integrations.transformers.layers import QuantModule
from crelle.integrations.transformers.quantizer import CrelleQuantizer, require_version
from crelle.integrations.transformers.saving import bind_save
from crelle.integrations.transformers.swap import swap
from crelle.integrations.transformers.targets import Targets
from crelle.quantizers.atom import Atom
from crelle.quantizers.auto import Auto
from crelle.quantizers.awq import AWQ
from crelle.quantizers.base import ActivationQuantizer, Quantizer
from crelle.quantizers.layer_api import Progress
from crelle.quantizers.stats import InputRounding, Stats, StatsCollector

Batch = Tensor | Mapping[str, Any]  # input_ids, or what the model is called with


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What `quantize` did."""

    matrices: int
    bits_per_weight: float  # over the quantized matrices, every scale counted
    bytes: int  # of those matrices
    seconds: float


class _SeenError(Exception):
    """Raised once a stage has seen its input: the rest of the model need not run."""


def quantize(
    model: Any,
    scheme: str,
    batches: Iterable[Batch] = (),
    *,
    overrides: Mapping[str, str] | None = None,
    modules_to_not_convert: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantize a model in place; `model.save_pretrained` then writes a Crelle checkpoint.

    `batches` is what schemes that calibrate look at: token ids [B, T], or dicts of what the model is called with, whose
    attention_mask says which tokens count.
    """
    begun = perf_counter()
    require_version()
    config = CrelleConfig(scheme, overrides, modules_to_not_convert)
    if any(isinstance(m, QuantModule) for m in model.modules()):
        raise SchemeError("the model is quantized already; start from the original")
    chosen = {name: _for_any_family(q) for name, _, q in Targets(model, config)}
    _refuse_experts(model, chosen)
    calls = [b if isinstance(b, Mapping) else {"input_ids": b} for b in batches]
    needing = [name for name, q in chosen.items() if q.calibrated]
    if needing and not calls:
        raise SchemeError(f"scheme '{chosen[needing[0]]}' looks at data: give quantize() batches of inputs")
    was_training = model.training
    model.eval()
    stages = _stages(model, needing, calls[0]) if needing else []
    plain = [(name,) for name in chosen if name not in needing]
    done = 0
    for stage in (*plain, *stages):
        _quantize_stage(model, stage, chosen, calls)
        done += len(stage)
        if progress:
            progress(done, len(chosen), stage[-1])
    _mark(model, replace_schemes(config, chosen))
    model.train(was_training)
    return _report(model, perf_counter() - begun)


def _for_any_family(q: Quantizer) -> Quantizer:
    """Return a quantizer that works matrix by matrix, or refuse one that cannot."""
    if isinstance(q, AWQ | Auto) or getattr(q, "tune", "none") != "none":
        raise SchemeError(
            f"scheme '{q}' works on whole decoder layers, whose parts it must know: use `crelle quantize` for families "
            "that Crelle runs, and gptq, hbcq, mixed or atom (without tune) here"
        )
    return replace(q, folds=False) if isinstance(q, Atom) else q  # folds need to know the norms before a linear


def replace_schemes(config: CrelleConfig, chosen: Mapping[str, Quantizer]) -> CrelleConfig:
    """Return the config with the schemes that were carried out."""
    default, special = config.quantizers()
    config.scheme = str(_for_any_family(default)) if default.calibrated else str(default)
    config.overrides = {p: str(_for_any_family(q)) for p, q in special.items()}
    return config


def _refuse_experts(model: nn.Module, chosen: Mapping[str, Quantizer]) -> None:
    for name in chosen:
        if is_experts(model.get_submodule(name)):
            raise UnsupportedError(
                f"'{name}' holds experts, which are quantized while a model is loaded (quantization_config=…), not "
                "afterwards: name it in modules_to_not_convert to leave it as it is"
            )


def _stages(model: nn.Module, names: Sequence[str], batch: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the linears in the order in which they run, those that read the same tensor together."""
    read: dict[str, Tensor] = {}  # holds the tensors: the memory of one is no other's meanwhile
    hooks = []
    for name in names:

        def see(_: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            read.setdefault(name, args[0])

        hooks.append(model.get_submodule(name).register_forward_pre_hook(see))
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    if missing := [n for n in names if n not in read]:
        raise SchemeError(
            f"'{missing[0]}' does not run on the batches: give others, or name it in modules_to_not_convert"
        )
    by_input: dict[tuple[Any, ...], list[str]] = {}
    for name, x in read.items():
        by_input.setdefault((x.data_ptr(), x.shape, x.stride()), []).append(name)
    return [tuple(stage) for stage in by_input.values()]


@torch.no_grad()
def _quantize_stage(
    model: Any, stage: Sequence[str], chosen: Mapping[str, Quantizer], calls: Sequence[Mapping[str, Any]]
) -> None:
    weights = {name: model.get_submodule(name).weight for name in stage}
    stats: Stats | None = None
    by_rounding: dict[InputRounding, Stats] = {}
    if any(chosen[name].calibrated for name in stage):
        stats = _stats(model, stage[0], calls)
        stats = replace(stats, readers=torch.stack([_readers(model, name) for name in stage]).sum(0))
    for name, weight in weights.items():
        quantizer, used = chosen[name], stats
        if stats is not None and isinstance(quantizer, ActivationQuantizer):
            rounding = quantizer.rounding(stats)
            if rounding is not None:
                if rounding not in by_rounding:
                    by_rounding[rounding] = _stats(model, stage[0], calls, rounding)
                used = by_rounding[rounding]

        def fit(w: Tensor, quantizer: Quantizer = quantizer, used: Stats | None = used) -> QuantTensor:
            return quantizer.fit(w.float(), used)

        try:
            swap(model, name, weight.data, weight.dtype, fit, CrelleConfig().choice)
        except CrelleError as e:
            raise type(e)(f"'{name}': {e}") from e


def _readers(model: nn.Module, name: str) -> Tensor:
    """Return WᵀW [K, K]."""
    module: Any = model.get_submodule(name)
    w: Tensor = module.weight.data.float()
    return w.T @ w if isinstance(module, nn.Linear) else w @ w.T  # Conv1D: [K, N]


def _stats(model: Any, name: str, calls: Sequence[Mapping[str, Any]], rounding: InputRounding | None = None) -> Stats:
    """Run the batches up to a linear and return the stats of what it reads."""
    collector: StatsCollector | None = None
    for batch in calls:
        with _seeing(model, name) as seen, torch.no_grad():
            model(**batch)
        for x in seen:
            kept = _counting(x, batch.get("attention_mask"))
            if rounding is not None:
                kept = rounding(kept)
            collector = collector or StatsCollector(x.shape[-1], x.device)
            collector.add(kept)
    assert collector is not None  # it runs: _stages
    return replace(collector.stats(), rounding=rounding)


@contextmanager
def _seeing(model: nn.Module, name: str) -> Any:
    """Collect what a linear reads, and stop the model there."""
    seen: list[Tensor] = []

    def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])
        raise _SeenError

    hook = model.get_submodule(name).register_forward_pre_hook(see)
    try:
        yield seen
    except _SeenError:
        pass
    finally:
        hook.remove()


def _counting(x: Tensor, mask: Any) -> Tensor:
    """Leave out padding, where the batch says what is."""
    if isinstance(mask, Tensor) and mask.ndim == 2 and x.shape[:2] == mask.shape:
        return x[mask.bool().to(x.device)]  # [tokens, K]
    return x


def _mark(model: Any, config: CrelleConfig) -> None:
    """Let transformers know the model as one of ours, as from_pretrained would."""
    model.is_quantized, model.quantization_method = True, "crelle"
    model.hf_quantizer = CrelleQuantizer(config, pre_quantized=True)
    model.config.quantization_config = config
    bind_save(model)


def _report(model: nn.Module, seconds: float) -> QuantizeReport:
    matrices = [m.quant_tensor() for m in model.modules() if isinstance(m, QuantModule)]
    size, count = sum(map(nbytes, matrices)), sum(w.shape[0] * w.shape[1] for w in matrices)
    return QuantizeReport(len(matrices), 8 * size / max(1, count), size, seconds)

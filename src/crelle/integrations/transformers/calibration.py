"""Quantizes any loaded transformers model with schemes that look at data, by hooks on its linears.

Block by block, and in a block stage by stage: linears that read the same input are a stage, fitted to inputs that come
from everything quantized before (as crelle.quantizers.calibration.calibrate does for our own families). Until the end
the model keeps its own modules and weights, which dequantized values replace during calls only (stand_in.py): if
`quantize` is interrupted or fails, the model is as it was. Schemes that change a decoder layer as a whole (awq, auto,
tune=…) need to know the family, and are refused.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from crelle.errors import CrelleError, SchemeError, UnsupportedError
from crelle.formats.base import QuantTensor, nbytes
from crelle.integrations.transformers.block_inputs import Batch, BlockInputs, Call, calls_of, stages
from crelle.integrations.transformers.config import CrelleConfig
from crelle.integrations.transformers.experts import is_experts
from crelle.integrations.transformers.layers import Choice, QuantModule
from crelle.integrations.transformers.methods import bind
from crelle.integrations.transformers.quantizer import CrelleQuantizer, require_version
from crelle.integrations.transformers.stand_in import StandIn, all_or_nothing
from crelle.integrations.transformers.swap import matrices_of, swap
from crelle.integrations.transformers.targets import Targets
from crelle.quantizers.base import ActivationQuantizer, GuidedConfig, Quantizer
from crelle.quantizers.calibration.layer_api import Progress
from crelle.quantizers.calibration.stats import InputRounding, Stats, StatsCollector
from crelle.quantizers.schemes.atom import Atom
from crelle.quantizers.schemes.auto import Auto
from crelle.quantizers.schemes.awq import AWQ

_BLOCK = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What `quantize` did."""

    matrices: int
    bits_per_weight: float  # over the quantized matrices, every scale counted
    bytes: int  # of those matrices
    seconds: float


def quantize(
    model: Any,
    scheme: str,
    batches: Iterable[Tensor | Batch] = (),
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
    work = _Work(model, chosen, calls, progress)
    with _evaluating(model), work:
        work.without_data([name for name in chosen if name not in needing])
        if needing:
            work.with_data(needing)
    with all_or_nothing(model):
        work.finish()
        _mark(model, _carried_out(config))
    return _report(model, perf_counter() - begun)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Run without dropout, and without a KV cache: blocks are called again and again with the same arguments."""
    training = {m: m.training for m in model.modules()}
    used = getattr(model.config, "use_cache", None)
    try:
        model.eval()
        if used is not None:
            model.config.use_cache = False
        yield
    finally:
        if used is not None:
            model.config.use_cache = used
        for module, was in training.items():
            module.training = was


def _block_of(name: str) -> str:
    """Return the numbered layer that a module is in, "" if it is in none."""
    found = _BLOCK.match(name)
    return found[1] if found else ""


class _Work:
    """What is quantized so far, and how to go on; a context manager, in which the model computes with that."""

    def __init__(
        self, model: Any, chosen: Mapping[str, Quantizer], calls: Sequence[Batch], progress: Progress | None
    ) -> None:
        self.model, self.chosen, self.calls, self.progress = model, chosen, calls, progress
        self.fitted: dict[str, list[QuantTensor]] = {}  # GPT-2's q, k and v: three of one module
        self._stand_ins: dict[str, StandIn] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stand_in in self._stand_ins.values():
            stand_in.remove()

    @torch.no_grad()
    def without_data(self, names: Sequence[str]) -> None:
        for name in names:
            self._fit(name, None)

    @torch.no_grad()
    def with_data(self, names: Sequence[str]) -> None:
        blocks: dict[str, list[str]] = {}
        for name in names:
            blocks.setdefault(_block_of(name), []).append(name)
        inputs = BlockInputs(self.model, [b for b in blocks if b], self.calls)
        for block in [*inputs.order, *([""] if "" in blocks else [])]:
            outer = self.model.get_submodule(block)
            calls = inputs.of(block)
            for name, stand_in in self._stand_ins.items():
                stand_in.keep(_block_of(name) == block)
            inside = [n.removeprefix(f"{block}.") if block else n for n in blocks[block]]
            for stage in stages(outer, inside, calls[0]):
                self._stage(outer, block, stage, calls)
        if missing := [n for n in names if n not in self.fitted]:
            raise SchemeError(
                f"'{missing[0]}' does not run on the batches: give others, or name it in modules_to_not_convert"
            )

    def _stage(self, outer: nn.Module, block: str, stage: Sequence[str], calls: Sequence[Call]) -> None:
        whole = {n: f"{block}.{n}" if block else n for n in stage}
        readers = torch.stack([_readers(outer.get_submodule(n)) for n in stage]).sum(0)
        stats = replace(_stats(outer, stage[0], calls, self.calls), readers=readers)
        by_rounding: dict[InputRounding, Stats] = {}
        for name in stage:
            quantizer, used = self.chosen[whole[name]], stats
            rounding = quantizer.rounding(stats) if isinstance(quantizer, ActivationQuantizer) else None
            if rounding is not None:
                if rounding not in by_rounding:
                    by_rounding[rounding] = _stats(outer, stage[0], calls, self.calls, rounding)
                used = by_rounding[rounding]
            self._fit(whole[name], used)

    def _fit(self, name: str, stats: Stats | None) -> None:
        """Quantize a module's matrices and let it compute with them."""
        module, quantizer = self.model.get_submodule(name), self.chosen[name]
        try:
            found = [quantizer.fit(w.float(), stats) for w in matrices_of(self.model, name, module)]
        except CrelleError as e:
            raise type(e)(f"'{name}': {e}") from e
        self.fitted[name] = found
        self._stand_ins[name] = stand_in = StandIn(module, found)
        stand_in.keep(stats is not None)
        stand_in.start()
        if self.progress:
            self.progress(len(self.fitted), len(self.chosen), name)

    def finish(self) -> None:
        """Put our modules in."""
        before = set(self.model.modules())
        for name, found in self.fitted.items():
            weight, left = self.model.get_submodule(name).weight, iter(found)
            swap(self.model, name, weight.data, weight.dtype, lambda _, left=left: next(left), Choice())  # type: ignore[misc]
        for module in set(self.model.modules()) - before:
            module.training = self.model.training


def _for_any_family(q: Quantizer) -> Quantizer:
    """Return a quantizer that works matrix by matrix, or refuse one that cannot."""
    if isinstance(q, AWQ | Auto) or getattr(q, "tune", "none") != "none":
        raise SchemeError(
            f"scheme '{q}' works on whole decoder layers, whose parts it must know: use `crelle quantize` for families "
            "that Crelle runs, and gptq, hbcq, mixed or atom (without tune) here"
        )
    if isinstance(q, GuidedConfig) and q.guidance:
        raise SchemeError(
            f"scheme '{q}' weights tokens by the loss, which this calibration does not see: use guidance=0"
        )
    return replace(q, folds=False) if isinstance(q, Atom) else q  # folds need to know the norms before a linear


def _carried_out(config: CrelleConfig) -> CrelleConfig:
    """Return the config with the schemes as they were carried out."""
    default, special = config.quantizers()
    config.scheme = str(_for_any_family(default))
    config.overrides = {p: str(_for_any_family(q)) for p, q in special.items()}
    return config


def _refuse_experts(model: nn.Module, chosen: Mapping[str, Quantizer]) -> None:
    for name in chosen:
        if is_experts(model.get_submodule(name)):
            raise UnsupportedError(
                f"'{name}' holds experts, which are quantized while a model is loaded (quantization_config=…), not "
                "afterwards: name it in modules_to_not_convert to leave it as it is"
            )


def _readers(module: Any) -> Tensor:
    """Return WᵀW [K, K]."""
    w: Tensor = module.weight.data.float()
    return w @ w.T if isinstance(module, Conv1D) else w.T @ w  # Conv1D: [K, N]


def _stats(
    outer: nn.Module,
    name: str,
    calls: Sequence[Call],
    batches: Sequence[Batch],
    rounding: InputRounding | None = None,
) -> Stats:
    """Run a block up to a linear and return the stats of what that reads."""
    collector: StatsCollector | None = None
    for call, batch in zip(calls, batches, strict=True):
        for seen in calls_of(outer, name, call):
            x = _counting(seen.args[0], batch.get("attention_mask"))
            collector = collector or StatsCollector(x.shape[-1], x.device)
            collector.add(x if rounding is None else rounding(x))
    assert collector is not None  # it runs: `stages`
    return replace(collector.stats(), rounding=rounding)


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
    bind(model)


def _report(model: nn.Module, seconds: float) -> QuantizeReport:
    matrices = [m.quant_tensor() for m in model.modules() if isinstance(m, QuantModule)]
    size, count = sum(map(nbytes, matrices)), sum(w.shape[0] * w.shape[1] for w in matrices)
    return QuantizeReport(len(matrices), 8 * size / max(1, count), size, seconds)

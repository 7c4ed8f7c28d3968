"""What the kernels' rounding costs: perplexity through each of them, and their products against f64.

Perplexity as a prompt (many rows at a time) and token by token (as decoding does): these run through different code.
Products on random weights, for every instruction set of this machine, 1 to 8 bits, one row and many, with calm inputs
and with inputs of which 1% are outliers, 20 times as large.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from crelle.engine.llm import LLM
from crelle.errors import SchemeError, UnsupportedError
from crelle.eval.perplexity import perplexity
from crelle.kernels import cpu
from crelle.kernels.cpu.check import instruction_set, max_relative_error
from crelle.quantizers.scheme import parse

KERNELS = ("dequantized", "cpu", "cpu-int8")  # the first is what the others are compared with
SCHEMES = {"bcq": "bcq:bits={},group=128,rounds=0", "uniform": "rtn:bits={},group=128"}
BITS = range(1, 9)
_N, _K, _ROWS = 192, 4096, (1, 33)  # 33 rows: AMX multiplies tiles
_OUTLIERS, _LARGER = 0.01, 20.0

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Quality:
    """A perplexity through one kernel."""

    kernel: str
    read_as: str  # "prompt" or "token by token"
    perplexity: float
    above_first: float  # relative to the first kernel's, read the same way
    tokens: int
    windows: int
    context: int


@dataclass(frozen=True, slots=True)
class ProductError:
    """Largest error of a product, relative to the largest output, by what x is rounded to."""

    isa: str
    format: str
    bits: int
    exact: float
    exact_outliers: float
    int8: float
    int8_outliers: float


def perplexities(
    model: Path,
    text: str,
    *,
    kernels: Sequence[str] = (),
    context: int = 1024,
    tokens: int | None = None,
    step_tokens: int = 512,
    progress: Progress | None = None,
) -> tuple[list[Quality], dict[str, str]]:
    """Measure a model on a text through each kernel; return what was measured, and why other kernels were not.

    `kernels`: those to insist on; without any, all of KERNELS that can run the model, or plain torch where none can.
    """
    if step_tokens < 2:
        raise SchemeError(f"`step_tokens` must be at least 2, got {step_tokens}")
    rows, left_out, first = list[Quality](), dict[str, str](), dict[str, float]()
    names: list[str | None] = list(kernels or KERNELS)
    for i, name in enumerate(names):
        try:
            llm = LLM.load(model, device="cpu", kernel=name)
        except UnsupportedError as e:
            if kernels:
                raise
            left_out[str(name)] = str(e).replace(str(model), model.name)  # results name no places of this machine
            if i + 1 == len(names) and not rows:
                names.append(None)  # a plain model: whatever it runs on
            continue
        for read_as in ("prompt", "token by token"):
            stepwise = read_as != "prompt"
            p = perplexity(
                llm,
                text,
                context=min(context, step_tokens) if stepwise else context,
                tokens=min(step_tokens, tokens or step_tokens) if stepwise else tokens,
                stepwise=stepwise,
            )
            above = p.perplexity / first.setdefault(read_as, p.perplexity) - 1
            rows.append(Quality(name or "plain", read_as, p.perplexity, above, p.tokens, p.windows, p.context))
            if progress:
                progress(2 * i + 1 + stepwise, 2 * len(names), f"{rows[-1].kernel}, {read_as}")
    return rows, left_out


def product_errors(progress: Progress | None = None) -> list[ProductError]:
    """Compare the C++ products with f64 of the dequantized weight; nothing where there is no extension."""
    if cpu.available() is not None:
        return []
    isas, rows = cpu.core().isas(), []
    for i, (format_name, bits) in enumerate(cases := [(f, b) for f in SCHEMES for b in BITS]):
        random = torch.Generator().manual_seed(bits)
        w = parse(SCHEMES[format_name].format(bits)).fit(torch.randn(_N, _K, generator=random) / _K**0.5)
        calm = list(_inputs(random, 0.0))
        wild = list(_inputs(random, _OUTLIERS))
        for isa in isas:
            with instruction_set(isa):
                worst = [max(max_relative_error(x, w, p) for x in xs) for p in ("exact", "int8") for xs in (calm, wild)]
            rows.append(ProductError(isa, format_name, bits, *worst))
        if progress:
            progress(i + 1, len(cases), f"{format_name}, {bits} bits")
    return sorted(rows, key=lambda r: isas.index(r.isa))


def _inputs(random: torch.Generator, outliers: float) -> Iterator[Tensor]:
    for M in _ROWS:
        x = torch.randn(M, _K, generator=random)
        yield torch.where(torch.rand(M, _K, generator=random) < outliers, _LARGER * x, x)

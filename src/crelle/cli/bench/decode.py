"""crelle bench decode: decoding speed of a whole model, on a CPU or a GPU."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.table import Column, Table

from crelle.cli.bench.rows import Energy, ResultFile, Rows, ThreadCounts, parse_threads, refuse, show
from crelle.cli.common.console import Json, KernelName, Memory, err, out
from crelle.errors import SchemeError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from crelle.bench.decode import DecodeSpeed
    from crelle.bench.decode_cuda import DecodeCuda
    from crelle.bench.model_shapes import RandomWeights
    from crelle.bench.planner.cost import Cost, CostModel
    from crelle.formats.storage.open import Weights

NAME = "decode"
Row = TypeVar("Row", "DecodeSpeed", "DecodeCuda")


def run(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MODEL]", help="Crelle checkpoint, Hugging Face directory, or .gguf file; or use --shape."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape", help="Instead of MODEL: a model shape with random weights, e.g. llama2-7b; repeatable."
        ),
    ] = None,
    scheme: Annotated[
        list[str] | None,
        typer.Option("--scheme", help="With --shape: quantization scheme; repeatable. Default: bcq:bits=3,group=128."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Device: cpu, cuda or auto. Default: cpu; with --shape, auto."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", help="Number of tokens to decode. Default: 64; with --shape or on a GPU 128."),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            "--prompt",
            help="MODEL on a CPU: prompt length in tokens. Default: 512, or what fits in the model's context.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", help="With --shape or on a GPU: context length before the first decoded token. Default: 128."
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", help="With --shape or on a GPU: batch size. Default: 1.")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="With --shape: run only the first N layers.")] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="Also time the same shape in f16, if it fits.")
    ] = True,
    threads: ThreadCounts = "",
    llama_bench: Annotated[
        Path | None, typer.Option("--llama-bench", help="CPU: path of a llama-bench program to time in the same run.")
    ] = None,
    llama_model: Annotated[
        list[Path] | None, typer.Option("--llama-model", help="CPU: GGUF file for llama-bench; repeatable.")
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds", help="Number of rounds. A CPU reports the best round, a GPU the median over all tokens."
        ),
    ] = 5,
    kernel: KernelName = None,
    memory: Memory = None,
    energy: Energy = True,
    cost: Annotated[
        str | None,
        typer.Option(
            "--cost",
            metavar="price=…[,watt=…]",
            help="Prices for the cost per million tokens: price= of the hardware, years= of depreciation (5), "
            "kwh= price "
            "per kWh (0.09), watt= if the power is not measured, currency= (USD).",
        ),
    ] = None,
    results: ResultFile = None,
    json: Json = False,
) -> None:
    """Time decoding with a whole model: a stored model, or a model shape with random weights.

    MODEL on a CPU: tokens per second of decoding (with an empty context) and of prefill. Otherwise: ms per token after
    a context, measured by graph replays, with the share of the memory bandwidth, peak memory, joules per token, and the
    same shape in f16 as baseline. A shape is built directly in its quantized form, layer by layer.

    **Example**: `crelle bench decode out/m --threads 1,2 --llama-bench ./llama-bench --llama-model q4_0.gguf`

    **Example**: `crelle bench decode --shape opt-175b --scheme bcq:bits=3,group=128 --device cuda`

    **Example**: `crelle bench decode --shape llama2-7b --scheme mixed --device cuda --cost price=30000`
    """
    from crelle.bench.planner.cost import CostModel
    from crelle.models.loader import choose_device

    costs = None if cost is None else CostModel.parse(cost)
    if (model is None) == (not shape):
        raise SchemeError("give either MODEL (a path) or --shape (a name such as llama2-7b)")
    chosen = choose_device(device or ("auto" if shape else "cpu"))
    if model is not None and chosen.type == "cpu":
        refuse("cpu", memory=memory, context=context, batch=batch, shape=shape, scheme=scheme, layers=layers)
        _on_cpu(model, tokens, prompt, threads, llama_bench, llama_model or [], rounds, kernel, costs, results, json)
        return
    if model is not None and (scheme or layers):
        raise SchemeError("--scheme and --layers apply to --shape only; MODEL runs as it is stored")
    refuse(chosen.type, prompt=prompt, llama_bench=llama_bench, llama_model=llama_model)
    if costs is not None and costs.watt is None and not (energy and chosen.type == "cuda"):
        raise SchemeError("the power is not measured here; give it: --cost price=…,watt=…")
    if threads:
        from crelle.cli.common.console import use_threads

        use_threads(parse_threads(threads)[0])
    options = {"tokens": _or(tokens, 128), "context": _or(context, 128), "batch": _or(batch, 1), "rounds": rounds}
    limited = {**options, "memory": memory}
    sources = [_stored(model)] if model is not None else [_named(s, scheme, layers) for s in shape or []]
    _whole_steps(sources, chosen, limited, baseline and memory is None, kernel, energy, costs, results, json)


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


@dataclass(frozen=True, slots=True)
class _Source:
    """A model in several schemes, and the same shape in f16."""

    name: str
    schemes: list[str]
    weights: "Callable[[str, torch.device], Weights]"
    plain: "Callable[[torch.device], RandomWeights]"


def _named(name: str, schemes: list[str] | None, layers: int | None) -> _Source:
    from crelle.bench.model_shapes import RandomWeights, config_of
    from crelle.quantizers.scheme import parse

    schemes = schemes or ["bcq:bits=3,group=128"]
    config_of(name)  # report a wrong name or scheme before the measurement starts
    for scheme in schemes:
        parse(scheme)

    def weights(scheme: str, device: "torch.device") -> RandomWeights:
        return RandomWeights(name, scheme, device, layers=layers)

    return _Source(name, schemes, weights, lambda device: weights("fp16", device))


def _stored(path: Path) -> _Source:
    from crelle.bench.model_shapes import RandomWeights
    from crelle.formats.storage.checkpoint import Checkpoint
    from crelle.formats.storage.open import open_weights

    opened = open_weights(path)
    scheme = f"{opened.scheme} as stored" if isinstance(opened, Checkpoint) else "as stored"
    return _Source(path.name, [scheme], lambda *_: opened, lambda device: RandomWeights(opened.config, "fp16", device))


def _whole_steps(
    sources: list[_Source],
    device: "torch.device",
    options: dict[str, Any],
    baseline: bool,
    kernel: str | None,
    energy: bool,
    costs: "CostModel | None",
    results: Path | None,
    json: bool,
) -> None:
    from crelle.bench.decode_cuda import DecodeCuda, free_memory, measure, with_baseline
    from crelle.bench.kernels.cuda_timer import Ceiling, gpu, read_ceiling

    ceiling: Ceiling | None = None
    facts: dict[str, object] = {}
    if device.type == "cuda":
        with err.status("measuring the memory bandwidth"):
            ceiling = read_ceiling()
        free_memory()
        facts = {"gpu": gpu(), "read_ceiling_gb_per_s": ceiling.gb_per_s, "read_ceiling": ceiling.how}
    rows = Rows(results, facts)

    def timed(source: _Source, scheme: str, plain: "DecodeCuda | None") -> "DecodeCuda":
        weights = source.plain(device) if scheme == "fp16" else source.weights(scheme, device)
        insisted = None if scheme == "fp16" else kernel
        row = measure(
            weights, scheme, device, kernel=insisted, ceiling=ceiling, energy=energy, profile=False, **options
        )
        watt = None if row.joules_per_token is None else row.joules_per_token * row.tokens_per_second
        return with_baseline(_priced(row, costs, row.tokens_per_second, watt), plain)

    for source in sources:
        plain: DecodeCuda | None = None
        wanted = [s for s in source.schemes if s != "fp16"]
        if baseline or len(wanted) < len(source.schemes):
            if reason := _no_plain(source, device):
                err.print(f"no f16 baseline: {reason}", highlight=False, markup=False, soft_wrap=True)
                rows.facts = {**rows.facts, f"no f16 of {source.name}": reason}
            else:
                plain = rows.add(f"{source.name} fp16", lambda source=source: timed(source, "fp16", None))  # type: ignore[misc]
        for s in wanted:
            rows.add(f"{source.name} {s}", lambda source=source, s=s, plain=plain: timed(source, s, plain))  # type: ignore[misc]
    if rows.finish(json):
        _table(rows.rows)
    rows.end(json)


def _no_plain(source: _Source, device: "torch.device") -> str | None:
    """Return why the shape cannot be timed in f16, or None."""
    from crelle.bench.decode_cuda import does_not_fit

    try:
        return does_not_fit(source.plain(device), device)
    except UnsupportedError as e:
        return str(e)


def _table(rows: "list[DecodeCuda]") -> None:
    first = rows[0]
    table = Table(
        Column("model", no_wrap=True),
        Column("scheme", no_wrap=True),
        *("ms/token", "tokens/s", "weights GB", "GB/s", "of ceiling", "speedup", "peak GB", "J/token", "graph"),
    )
    for r in rows:
        table.add_row(
            r.model,
            r.scheme,
            f"{r.milliseconds_per_token:.3f}",
            f"{r.tokens_per_second:.1f}",
            f"{r.weight_bytes / 1e9:.2f}",
            f"{r.gb_per_s:.0f}",
            "–" if r.share_of_ceiling is None else f"{r.share_of_ceiling:.0%}",
            "–" if r.speedup is None else f"{r.speedup:.2f}x",
            "–" if r.peak_memory_bytes is None else f"{r.peak_memory_bytes / 1e9:.1f}",
            "–" if r.joules_per_token is None else f"{r.joules_per_token:.3f}",
            "yes" if r.graph else "no",
        )
    out.print(f"{first.device}, batch {first.batch}, {first.tokens} tokens after {first.context}", highlight=False)
    if first.read_ceiling:
        out.print(f"ceiling {first.read_ceiling_gb_per_s:.0f} GB/s ({first.read_ceiling})", highlight=False)
    show(table)
    _cost_table([(f"{r.model} {r.scheme}", r.cost) for r in rows])
    for r in rows:
        if r.experts is not None:
            hits = "" if r.share_of_hits is None else f", {r.share_of_hits:.1%} of those that tokens took"
            out.print(f"{r.model} {r.scheme}: experts {r.experts}{hits}", highlight=False, soft_wrap=True)
    for note in sorted({n for r in rows for n in (r.energy_note, r.graph_note) if n}):
        out.print(note, highlight=False, markup=False, soft_wrap=True)


def _on_cpu(
    model: Path,
    tokens: int | None,
    prompt: int | None,
    threads: str,
    llama_bench: Path | None,
    llama_model: list[Path],
    rounds: int,
    kernel: str | None,
    costs: "CostModel | None",
    results: Path | None,
    json: bool,
) -> None:
    from crelle.bench.decode import default_sizes, measure, measure_llama_bench
    from crelle.engine.llm import LLM

    if llama_model and not llama_bench:
        raise SchemeError("--llama-model needs --llama-bench, the path of the program")
    if costs is not None and costs.watt is None:
        raise SchemeError("the power of a CPU is not measured; give it: --cost price=…,watt=…")

    def priced(row: "DecodeSpeed") -> "DecodeSpeed":
        return _priced(row, costs, row.decode_tokens_per_second, None)

    rows = Rows(results)
    for n in parse_threads(threads):
        llm = LLM.load(model, device="cpu", threads=n, kernel=kernel)
        sizes = {"tokens": tokens, "prompt": prompt}
        sizes = {name: _or(given, default_sizes(llm)[name]) for name, given in sizes.items()}
        rows.add(
            f"{n} threads",
            lambda llm=llm, n=n, sizes=sizes: priced(measure(llm, n, rounds=rounds, **sizes)),  # type: ignore[misc]
        )
        for gguf in llama_model:
            assert llama_bench is not None
            rows.add(
                f"{llama_bench.name} {gguf.name}, {n} threads",
                lambda gguf=gguf, n=n, sizes=sizes: priced(  # type: ignore[misc]
                    measure_llama_bench(llama_bench, gguf, n, **sizes)
                ),
            )
    if rows.finish(json):
        first: DecodeSpeed = rows.rows[0]
        table = Table(
            Column("program", no_wrap=True),
            "threads",
            f"decode {first.decode_tokens}, tokens/s",
            f"prefill {first.prefill_tokens}, tokens/s",
        )
        row: DecodeSpeed
        for row in rows.rows:
            decoded, read = row.decode_tokens_per_second, row.prefill_tokens_per_second
            table.add_row(row.who, str(row.threads), f"{decoded:.1f}", f"{read:.0f}")
        show(table)
        _cost_table([(f"{row.who}, {row.threads} threads", row.cost) for row in rows.rows])
    rows.end(json)


def _priced(row: Row, costs: "CostModel | None", tokens_per_second: float, watt: float | None) -> Row:
    return row if costs is None else replace(row, cost=costs.per_million(tokens_per_second, watt))


def _cost_table(rows: "list[tuple[str, Cost | None]]") -> None:
    """Print the cost per million tokens, if requested, and the ratio to the first row."""
    known = [(name, cost) for name, cost in rows if cost is not None]
    if not known:
        return
    first = known[0][1]
    table = Table(
        f"{first.currency} per million tokens",
        "watt",
        "hardware",
        "electricity",
        "total",
        "electricity vs. first",
        "total vs. first",
    )
    for name, c in known:
        runtime = "–" if not first.runtime or not c.runtime else f"{first.runtime / c.runtime:.2f}x less"
        total = "–" if not first.total or not c.total else f"{first.total / c.total:.2f}x less"
        table.add_row(name, f"{c.watt:.0f}", f"{c.buying:.4f}", f"{c.runtime:.4f}", f"{c.total:.4f}", runtime, total)
    show(table)

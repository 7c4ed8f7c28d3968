"""crelle plan: what fits on which GPUs, how fast it should be, and the command for vLLM."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crelle.cli.common.console import KV, Json, draw_whole, out, print_json, warn

if TYPE_CHECKING:
    from crelle.bench.planner.compare import Compared
    from crelle.bench.planner.plan import Plan
    from crelle.bench.planner.streamed import Streamed

NAME = "plan"
_ESTIMATE = "an estimate by a time model that was fitted to measurements on one H200 (docs/guide/plan.md)"


def run(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL|SHAPE", help="A model's directory or .gguf file, or a shape such as llama3-70b."),
    ],
    gpus: Annotated[int, typer.Option("--gpus", help="Number of GPUs that share the model.")] = 1,
    memory: Annotated[str, typer.Option("--memory", help="Available memory per GPU, e.g. 80GB or 24GiB.")] = "80GB",
    scheme: Annotated[
        str | None,
        typer.Option(
            "--scheme",
            help="Quantization scheme, e.g. bcq:bits=3,group=128; default: that of the checkpoint, else fp16.",
        ),
    ] = None,
    kv: KV = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", help="Tokens per sequence; default: 2048, or the model's context if that is shorter."
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", help="Number of concurrent sequences; default: as many as fit, up to 256.")
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", help="Price per GPU, including its share of the host (USD).")
    ] = None,
    watt: Annotated[
        float | None, typer.Option("--watt", help="Power draw per GPU under load, including its share of the host (W).")
    ] = None,
    kwh: Annotated[float, typer.Option("--kwh", help="Price per kilowatt-hour (USD).")] = 0.09,
    years: Annotated[float, typer.Option("--years", help="Depreciation period of the hardware, in years.")] = 5.0,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            "--bandwidth",
            help="Read bandwidth of your GPU (GB/s); all times scale with it. Default: 4430, measured on an H200; "
            "other GPUs were not validated.",
        ),
    ] = None,
    hits: Annotated[
        float | None,
        typer.Option(
            "--hits",
            help="If experts are streamed: share of the experts taken that are on the GPU. Default: as by chance.",
        ),
    ] = None,
    pcie: Annotated[
        float | None,
        typer.Option("--pcie", help="If experts are streamed: bandwidth from host memory (GB/s). Default: 40."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Use batch-invariant kernels, like `crelle serve --exact`.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Also estimate 1, 2, 4 and 8 of these GPUs, at fp16 and at the scheme, for one batch."
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Plot memory by part against the number of sequences to this PNG file."),
    ] = None,
    json: Json = False,
) -> None:
    """Plan a deployment: memory, number of concurrent sequences, speed, cost, and the command for vLLM.

    Memory is exact, as the formats store it; speed is **an estimate**. No weights are loaded and no GPU is needed.

    **Example**: `crelle plan llama3-70b --gpus 1 --memory 80GB --scheme bcq:bits=3,group=128 --kv 4`

    **Example**: `crelle plan llama3-405b --gpus 8 --memory 141GB --scheme rtn:bits=4 --price 30000 --watt 700`

    **Example**: `crelle plan opt-175b --memory 141GB --scheme bcq:bits=3,group=128 --compare`
    """
    from crelle.bench.planner.compare import compare_gpus
    from crelle.bench.planner.plan import enough_gpus, plan, vllm_command
    from crelle.bench.planner.plan_shapes import planned_shape
    from crelle.bench.planner.step_model import BANDWIDTH
    from crelle.bench.planner.streamed import PCIE
    from crelle.formats.kv.pages import KVFormat
    from crelle.quantizers.scheme import parse

    cost = _cost(gpus, price, watt, kwh, years)
    shape = planned_shape(model)
    stored = _stored(model)
    quantizer = parse(_usable(scheme or stored["scheme"], model))
    cache = KVFormat.parse(kv or stored["kv"])
    options: dict[str, Any] = {"gpus": gpus, "memory": memory, "context": context}
    options |= {"hits": hits, "pcie": PCIE if pcie is None else pcie}
    options |= {"bandwidth": BANDWIDTH if bandwidth is None else bandwidth, "batch_invariant": exact}
    found = plan(shape, quantizer, cache, batch=batch, cost=cost, **options)
    # vLLM's own cache has 16 bits, whatever the checkpoint was made for
    served = plan(shape, quantizer, KVFormat(), batch=None, cost=None, **options)
    command = vllm_command(served, "DIR" if stored["shape"] else model)
    if plot is not None:
        most = max(found.most_sequences, found.batch, 2)
        counts = sorted({1, *(max(1, round(i * most / 32)) for i in range(1, 33))})
        _draw(plot, [plan(shape, quantizer, cache, batch=n, **options) for n in counts])
    if scheme is None and stored["overrides"]:
        warn([f"some matrices of {model} have other schemes; the plan assumes {quantizer} for all"])
    vllm = {"command": command, "fits": served.fits, "sequences": served.most_sequences, "tokens": served.tokens}
    enough = gpus if found.fits else enough_gpus(shape, quantizer, cache, batch=batch, **options)
    beside = []
    if compare:
        costs = None if price is None or watt is None else lambda n: _cost(n, price, watt, kwh, years)
        options.pop("gpus")
        beside = compare_gpus(shape, quantizer, cache, batch=batch or 1, cost_of=costs, **options)
    if json:
        rows = {"compare": [asdict(row) for row in beside]} if compare else {}
        print_json({**asdict(found), "enough_gpus": enough, "note": _ESTIMATE, "vllm": vllm, **rows})
        return
    _show(found, vllm, enough)
    if beside:
        _show_comparison(found, beside)


def _cost(gpus: int, price: float | None, watt: float | None, kwh: float, years: float) -> Any:
    from crelle.bench.planner.cost import CostModel
    from crelle.errors import SchemeError

    if price is None and watt is None:
        return None
    if price is None or watt is None:
        raise SchemeError("the cost needs both --price and --watt (per GPU)")
    if not (0 <= price < float("inf") and 0 <= watt < float("inf") and 0 <= kwh < float("inf") and years > 0):
        raise SchemeError("--price, --watt and --kwh must be at least 0, and --years above 0")
    return CostModel(price * gpus, watt * gpus, kwh, years)


def _stored(model: str) -> dict[str, Any]:
    """Return the scheme and the cache format of a checkpoint, or the defaults for a shape."""
    from crelle.bench.planner.plan_shapes import NAMES
    from crelle.formats.kv.format import kv_of_checkpoint
    from crelle.formats.storage.checkpoint import Checkpoint
    from crelle.formats.storage.open import open_weights

    if model in NAMES:
        return {"scheme": "fp16", "kv": "16", "overrides": {}, "shape": True}
    weights = open_weights(model, verify=False)
    found = {"kv": kv_of_checkpoint(weights.config), "shape": False}
    if isinstance(weights, Checkpoint):
        return {"scheme": str(weights.scheme), "overrides": weights.quantization["overrides"], **found}
    return {"scheme": "keep" if "quantization_config" in weights.config else "fp16", "overrides": {}, **found}


def _usable(scheme: str, model: str) -> str:
    """Reject `keep`, which does not define how weights are stored."""
    from crelle.errors import SchemeError

    if scheme.strip() == "keep":
        raise SchemeError(
            f"the format of {model} is not a Crelle scheme: give the closest one, for example "
            "--scheme rtn:bits=4,group=128"
        )
    return scheme


def _show(found: "Plan", vllm: dict[str, Any], enough: int | None) -> None:
    from rich.table import Table

    from crelle.bench.planner.plan import memory_by_part, sequences
    from crelle.engine.memory.plan import show_bytes

    def say(text: str) -> None:
        out.print(text, highlight=False, soft_wrap=True, markup=False)

    say(
        f"{found.model}: {found.parameters / 1e9:.3g} billion parameters at {found.scheme}, "
        f"{found.bits_per_weight:.3f} bits per weight in the layers; cache {found.kv}, "
        f"{show_bytes(found.bytes_per_token)} per token"
    )
    table = Table(f"memory per GPU ({found.gpus} GPUs)" if found.gpus > 1 else "GPU memory", "GB")
    for part, size in memory_by_part(found).items():
        table.add_row(part, f"{size / 1e9:.2f}")
    table.add_row("total", f"{found.bytes_per_gpu / 1e9:.2f} of {found.memory_bytes / 1e9:.2f}")
    out.print(table)
    if found.gpus > 1:
        say(f"tensor parallel size {found.tensor_parallel}, pipeline parallel size {found.pipeline_parallel}")
    if found.why_not:
        say(f"does not fit: {found.why_not}" + (f"; {enough} GPUs of this size are enough" if enough else ""))
    else:
        say(
            f"fits: {sequences(found.batch)} of {found.context} tokens (maximum: {found.most_sequences}); "
            f"the KV cache holds {found.tokens:,} tokens"
        )
    if found.streamed is not None:
        _show_streamed(found.streamed, found.batch)
    if (e := found.estimate) is not None:
        say(
            f"decoding: {e.milliseconds_per_step:.2f} ms per step, {e.tokens_per_second:,.0f} tokens/s, "
            f"{e.tokens_per_second_each:.1f} tokens/s per sequence, with all sequences at full length"
        )
        if e.cost is not None:
            say(
                f"cost per million tokens: {e.cost.total:.4g} {e.cost.currency} "
                f"(hardware {e.cost.buying:.4g}, electricity {e.cost.runtime:.4g}), "
                "if the GPUs are always busy"
            )
        say(f"    {_ESTIMATE}" + (f"; not validated: {', '.join(e.unchecked)}" if e.unchecked else ""))
    if vllm["fits"]:
        say(f"vLLM with Crelle's plugin, with a 16-bit KV cache: {sequences(vllm['sequences'])}")
        say(f"    {vllm['command']}")
    else:
        say("vLLM with Crelle's plugin, with a 16-bit KV cache: no sequence fits")


def _show_streamed(found: "Streamed", batch: int) -> None:
    from crelle.engine.memory.plan import show_bytes

    def say(text: str) -> None:
        out.print(text, highlight=False, soft_wrap=True, markup=False)

    if found.why_not:
        say(f"with experts streamed from host memory it does not fit either: {found.why_not}")
        return
    several = f"{found.fewest_slots} to {found.most_slots}"
    slots = several if found.fewest_slots < found.most_slots else str(found.most_slots)
    say(
        f"fits with experts streamed from host memory: {slots} of {found.experts} experts of each layer on the GPU "
        f"({show_bytes(found.slot_bytes)}), {show_bytes(found.host_bytes)} in pinned host memory"
    )
    for s in found.speeds:
        chance = " (by chance)" if s.share_of_hits == found.by_chance else ""
        say(
            f"    {s.share_of_hits:.0%} of the experts taken on the GPU{chance}: a step of "
            f"{batch} reads {show_bytes(round(s.gpu_bytes_per_step))} there and "
            f"{show_bytes(round(s.pcie_bytes_per_step))} over PCIe, predicted {s.milliseconds_per_step:.1f} ms, "
            f"{s.tokens_per_second:,.0f} tokens/s"
        )
    say(f"    a prediction at {found.pcie_gb_per_s:g} GB/s over PCIe (--pcie, --hits); the server counts real hits")


def _show_comparison(found: "Plan", rows: "list[Compared]") -> None:
    from rich.table import Table

    from crelle.bench.planner.plan import sequences

    def cell(row: "Compared") -> str:
        if row.milliseconds_per_step is None:
            return "does not fit"
        cost = "" if row.cost_per_million is None else f", {row.cost_per_million:.4g} per million tokens"
        return f"{row.milliseconds_per_step:.2f}{cost}"

    schemes = list(dict.fromkeys(row.scheme for row in rows))
    batch = sequences(rows[0].batch)
    out.print(f"ms per step, estimated, {batch} of {found.context} tokens:", highlight=False, soft_wrap=True)
    table = Table("GPUs", *schemes)
    for gpus in dict.fromkeys(row.gpus for row in rows):
        table.add_row(str(gpus), *(cell(row) for row in rows if row.gpus == gpus))
    out.print(table)
    out.print(f"    {_ESTIMATE}; more than one GPU: not validated, links are assumed", highlight=False, soft_wrap=True)


def _draw(path: Path, plans: "list[Plan]") -> None:
    from crelle.bench.planner.plan import memory_by_part
    from crelle.plots import plot_memory

    parts = {name: [memory_by_part(p)[name] / 1e9 for p in plans] for name in memory_by_part(plans[0])}
    title = f"{plans[0].model} at {plans[0].scheme}, {plans[0].kv}, {plans[0].context} tokens each"
    draw_whole(
        path, lambda made: plot_memory(made, title, [p.batch for p in plans], parts, plans[0].memory_bytes / 1e9)
    )

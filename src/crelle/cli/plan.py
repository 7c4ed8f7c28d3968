"""crelle plan: what fits on which GPUs, how fast it should be, and the command for vLLM."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crelle.cli.common.console import KV, Json, draw_whole, out, print_json, warn

if TYPE_CHECKING:
    from crelle.bench.planner.plan import Plan

NAME = "plan"
_ESTIMATE = "an estimate: a model of the time, fitted to measurements on one H200 (docs/guide/plan.md)"


def run(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL|SHAPE", help="A model's directory or .gguf file, or a shape such as llama3-70b."),
    ],
    gpus: Annotated[int, typer.Option("--gpus", help="How many GPUs share the model.")] = 1,
    memory: Annotated[str, typer.Option("--memory", help="What one GPU has for us: 80GB, 24GiB.")] = "80GB",
    scheme: Annotated[
        str | None,
        typer.Option(
            "--scheme", help="How weights are stored: bcq:bits=3,group=128, …; default: as stored, else fp16."
        ),
    ] = None,
    kv: KV = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Tokens of a sequence; default: 2048, or what the model has.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", help="Sequences at once; default: as many as fit, up to 256.")
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", help="Price of one GPU with its share of the host (USD).")
    ] = None,
    watt: Annotated[
        float | None, typer.Option("--watt", help="Power draw per GPU under load, including its share of the host (W).")
    ] = None,
    kwh: Annotated[float, typer.Option("--kwh", help="Price of a kilowatt-hour (USD).")] = 0.09,
    years: Annotated[float, typer.Option("--years", help="Years of service over which the price is spread.")] = 5.0,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            "--bandwidth",
            help="GB/s that a read reaches on your GPU; all times scale with it. Default: 4430, the H200 that was "
            "measured; other values were not checked.",
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Batch-invariant products, as `crelle serve --exact` has them.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw memory by part against the number of sequences: OUT.png.")
    ] = None,
    json: Json = False,
) -> None:
    """Say what fits where, how many sequences run at once, how fast and at what cost, and the command for vLLM.

    Bytes are counted as the formats store them; speed is **an estimate**. Nothing is loaded and no GPU is needed.

    **Example**: `crelle plan llama3-70b --gpus 1 --memory 80GB --scheme bcq:bits=3,group=128 --kv 4`

    **Example**: `crelle plan llama3-405b --gpus 8 --memory 141GB --scheme rtn:bits=4 --price 30000 --watt 700`
    """
    from crelle.bench.planner.plan import enough_gpus, plan, vllm_command
    from crelle.bench.planner.plan_shapes import planned_shape
    from crelle.bench.planner.step_model import BANDWIDTH
    from crelle.formats.kv.pages import KVFormat
    from crelle.quantizers.scheme import parse

    cost = _cost(gpus, price, watt, kwh, years)
    shape = planned_shape(model)
    stored = _stored(model)
    quantizer = parse(_usable(scheme or stored["scheme"], model))
    cache = KVFormat.parse(kv or stored["kv"])
    options: dict[str, Any] = {"gpus": gpus, "memory": memory, "context": context}
    options |= {"bandwidth": BANDWIDTH if bandwidth is None else bandwidth, "batch_invariant": exact}
    found = plan(shape, quantizer, cache, batch=batch, cost=cost, **options)
    # vLLM's own cache has 16 bits, whatever the checkpoint's has
    served = plan(shape, quantizer, KVFormat(), batch=None, cost=None, **options)
    command = vllm_command(served, "DIR" if stored["shape"] else model)
    if plot is not None:
        most = max(found.most_sequences, found.batch, 2)
        counts = sorted({1, *(max(1, round(i * most / 32)) for i in range(1, 33))})
        _draw(plot, [plan(shape, quantizer, cache, batch=n, **options) for n in counts])
    if scheme is None and stored["overrides"]:
        warn([f"{model} has matrices with other schemes than {quantizer}, which are counted as if they had it"])
    vllm = {"command": command, "fits": served.fits, "sequences": served.most_sequences, "tokens": served.tokens}
    enough = gpus if found.fits else enough_gpus(shape, quantizer, cache, batch=batch, **options)
    if json:
        print_json({**asdict(found), "enough_gpus": enough, "note": _ESTIMATE, "vllm": vllm})
        return
    _show(found, vllm, enough)


def _cost(gpus: int, price: float | None, watt: float | None, kwh: float, years: float) -> Any:
    from crelle.bench.planner.cost import CostModel
    from crelle.errors import SchemeError

    if price is None and watt is None:
        return None
    if price is None or watt is None:
        raise SchemeError("the cost of tokens needs both: --price and --watt, of one GPU")
    if not (0 <= price < float("inf") and 0 <= watt < float("inf") and 0 <= kwh < float("inf") and years > 0):
        raise SchemeError("--price, --watt and --kwh are not negative, and --years is more than 0")
    return CostModel(price * gpus, watt * gpus, kwh, years)


def _stored(model: str) -> dict[str, Any]:
    """Return what the files at a path say of scheme and cache, or what shapes have where nothing is said."""
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
    """Refuse what does not say how weights are stored."""
    from crelle.errors import SchemeError

    if scheme.strip() == "keep":
        raise SchemeError(
            f"how {model} stores its weights was chosen elsewhere: give the scheme that comes nearest, "
            "--scheme rtn:bits=4,group=128"
        )
    return scheme


def _show(found: "Plan", vllm: dict[str, Any], enough: int | None) -> None:
    from rich.table import Table

    from crelle.bench.planner.plan import memory_by_part, sequences
    from crelle.engine.memory import show_bytes

    def say(text: str) -> None:
        out.print(text, highlight=False, soft_wrap=True, markup=False)

    say(
        f"{found.model}: {found.parameters / 1e9:.3g} billion parameters at {found.scheme}, "
        f"{found.bits_per_weight:.3f} bits per weight in the layers; cache {found.kv}, "
        f"{show_bytes(found.bytes_per_token)} a token"
    )
    table = Table(f"on each of {found.gpus} GPUs" if found.gpus > 1 else "on the GPU", "GB")
    for part, size in memory_by_part(found).items():
        table.add_row(part, f"{size / 1e9:.2f}")
    table.add_row("all", f"{found.bytes_per_gpu / 1e9:.2f} of {found.memory_bytes / 1e9:.2f}")
    out.print(table)
    if found.gpus > 1:
        say(f"matrices shared out among {found.tensor_parallel} GPUs, pipeline stages: {found.pipeline_parallel}")
    if found.why_not:
        say(f"does not fit: {found.why_not}" + (f"; {enough} such GPUs are enough" if enough else ""))
    else:
        say(
            f"fits: {sequences(found.batch)} of {found.context} tokens at once (most: {found.most_sequences}); the "
            f"cache has room for {found.tokens:,} tokens"
        )
    if (e := found.estimate) is not None:
        say(
            f"decoding: {e.milliseconds_per_step:.2f} ms a step, {e.tokens_per_second:,.0f} tokens/s, "
            f"{e.tokens_per_second_each:.1f} each, all sequences at their full length"
        )
        if e.cost is not None:
            say(
                f"a million tokens: {e.cost.total:.4g} {e.cost.currency} "
                f"(buying {e.cost.buying:.4g}, electricity {e.cost.runtime:.4g}), "
                "GPUs busy all day"
            )
        say(f"    {_ESTIMATE}" + (f"; not measured: {', '.join(e.unchecked)}" if e.unchecked else ""))
    if vllm["fits"]:
        say(f"vLLM with Crelle's plugin, its cache at 16 bits: {sequences(vllm['sequences'])}")
        say(f"    {vllm['command']}")
    else:
        say("vLLM, whose cache has 16 bits: not one sequence fits")


def _draw(path: Path, plans: "list[Plan]") -> None:
    from crelle.bench.planner.plan import memory_by_part
    from crelle.plots import plot_memory

    parts = {name: [memory_by_part(p)[name] / 1e9 for p in plans] for name in memory_by_part(plans[0])}
    title = f"{plans[0].model} at {plans[0].scheme}, {plans[0].kv}, {plans[0].context} tokens each"
    draw_whole(
        path, lambda made: plot_memory(made, title, [p.batch for p in plans], parts, plans[0].memory_bytes / 1e9)
    )

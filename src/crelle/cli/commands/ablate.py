"""crelle ablate: the contribution of each part of a method."""

from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crelle.cli.common.calibration import CalibrationText, calibration_text
from crelle.cli.common.console import (
    Device,
    Json,
    Results,
    Threads,
    draw_whole,
    err,
    out,
    print_json,
    tracking,
    use_threads,
)

if TYPE_CHECKING:
    from crelle.eval.ablation import Row

NAME = "ablate"
app = typer.Typer(no_args_is_help=True, help="Measure the contribution of each part of a method, as perplexity.")


@app.command()
def atom(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face directory or a .gguf file.")],
    text: Annotated[
        Path | None, typer.Option("--text", help="Evaluation text (UTF-8); default: Python's documentation.")
    ] = None,
    context: Annotated[int, typer.Option("--context", help="Tokens per evaluation window.")] = 1024,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Evaluate only the first N tokens of the text.")
    ] = None,
    calib: CalibrationText = None,
    rows: Annotated[int, typer.Option("--rows", help="Number of calibration sequences.")] = 64,
    length: Annotated[int, typer.Option("--length", help="Tokens per calibration sequence.")] = 512,
    w: Annotated[int, typer.Option("--w", help="Bits per weight: 3, 4 or 8.")] = 4,
    a: Annotated[int, typer.Option("--a", help="Bits per activation: 3, 4 or 8.")] = 4,
    kv: Annotated[str, typer.Option("--kv", help="KV cache format of the last steps.")] = "4",
    group: Annotated[int, typer.Option("--group", help="Number of channels that share a scale.")] = 128,
    outliers: Annotated[int, typer.Option("--outliers", help="Number of outlier channels, stored in 8 bits.")] = 128,
    train: Annotated[
        int, typer.Option("--train", help="Training steps per layer in the last row; 0: no training.")
    ] = 64,
    device: Device = "auto",
    threads: Threads = None,
    target: Results = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted run with the same --out and settings.")
    ] = False,
    json: Json = False,
) -> None:
    """Add the parts of Atom one by one: outlier channels, groups, clipping, error feedback, KV cache, training.

    Each row quantizes a checkpoint, measures it with the kernels that serve it, and deletes it. With --out, finished
    rows are saved in NAME.partial.json, and --resume continues from there.

    **Example**: `crelle ablate atom ./SmolLM2-135M --text wiki.txt --tokens 10240 --out ablation.json`
    """
    from rich.table import Table

    from crelle.bench.environment import environment
    from crelle.eval.ablation import ablate, atom_steps
    from crelle.eval.text import read_text
    from crelle.formats.storage.io import to_json, write_whole
    from crelle.plots import plot_bars
    from crelle.quantizers.scheme import parse

    use_threads(threads)
    steps = atom_steps(w, a, kv, group, outliers, train)
    for step in steps:
        parse(step.scheme or "fp32")  # report a bad scheme before the work starts
    corpus, calibration = read_text(text), calibration_text(calib, rows=rows, length=length)
    settings = {"model": model.name, "context": context, "tokens": tokens, "calibration": [rows, length]}
    settings["texts"] = [sha256(t.encode()).hexdigest()[:16] for t in (corpus, calibration.text)]
    partial = None if target is None else target.with_suffix(".partial.json")
    known = _known(partial, settings) if resume else []
    result: dict[str, Any] = {**settings, "rows": [], "resumed_rows": len(known)}
    with tracking("ablation") as track:
        options = {"context": context, "tokens": tokens, "device": device, "known": known, "progress": track}
        found = []
        for row in ablate(model, steps, corpus, calibration, **options):  # type: ignore[arg-type]
            found.append(row)
            err.print(f"{row.name}: {row.perplexity:.3f} ({row.ratio:.3f})", highlight=False)
            result["rows"].append(asdict(row))
            if partial is not None:
                write_whole(partial, to_json({**environment(), **result}))
    if target is not None and partial is not None:
        write_whole(target, to_json({**environment(), **result}))
        partial.unlink()
        names, ratios = [row.name for row in found], [row.ratio for row in found]
        title = f"{model.name}: W{w}A{a}, part by part"
        # RTN may be hundreds of times full precision: the others set the axis
        between = min(1.0, *ratios), max(1.1, 1 + 1.15 * (sorted(ratios)[-2] - 1))
        draw_whole(
            target.with_suffix(".png"),
            lambda path: plot_bars(path, names, {"perplexity ratio": ratios}, title, "times full precision", between),
        )
    if json:
        print_json(result)
        return
    table = Table("step", "perplexity", "ratio", "bits/weight", "scheme")
    for row in found:
        bits = f"{row.bits_per_weight:.3f}" if row.bits_per_weight else ""
        table.add_row(row.name, f"{row.perplexity:.3f}", f"{row.ratio:.3f}", bits, row.scheme)
    out.print(table)


def _known(partial: Path | None, settings: Mapping[str, Any]) -> "list[Row]":
    """Return the rows of an interrupted run; raises if it had other settings."""
    from crelle.errors import CrelleError
    from crelle.eval.ablation import Row
    from crelle.formats.storage.io import read_json

    if partial is None:
        raise CrelleError("--resume needs --out: NAME.partial.json has the finished rows of the interrupted run")
    if not partial.exists():
        return []
    found = read_json(partial)
    if other := [name for name, value in settings.items() if found.get(name) != value]:
        raise CrelleError(
            f"cannot resume: {partial} was written with another {', '.join(other)}; delete it to start over"
        )
    try:
        return [Row(**row) for row in found["rows"]]
    except (KeyError, TypeError) as e:
        raise CrelleError(f"cannot resume: {partial} is not an ablation result; delete it to start over") from e

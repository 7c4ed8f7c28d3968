"""crelle bench plot: the plot of a result file, also where the measuring machine has no matplotlib."""

from pathlib import Path
from typing import Annotated, Any

import typer

from crelle.cli.common.console import Json, err, out, print_json
from crelle.errors import FormatError, UnsupportedError

NAME = "plot"
Row = dict[str, Any]


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Result file of a benchmark.")],
    to: Annotated[
        Path | None, typer.Option("--out", help="PNG file to write; default: FILE with the suffix .png.")
    ] = None,
    json: Json = False,
) -> None:
    """Plot a result file of bench gemv, gemm, decode, serve or attention; no GPU is needed.

    **Example**: `crelle bench plot bench/results/h200-gemv.json`
    """
    from crelle.formats.storage.io import read_json

    if not file.is_file():
        raise FormatError(f"{file} does not exist; give a .json file of `crelle bench … --out NAME`")
    rows = read_json(file).get("rows")
    if not (isinstance(rows, list) and rows and all(isinstance(r, dict) for r in rows)):
        raise FormatError(f"{file} has no rows, so it is not a result file of `crelle bench`")
    path = to or file.with_suffix(".png")
    try:
        draw(path, rows)
    except (KeyError, TypeError, ValueError) as e:
        raise FormatError(f"{file} contains rows of a kind that cannot be plotted ({e})") from e
    if json:
        print_json({"picture": path.name})
    else:
        out.print(str(path), highlight=False, soft_wrap=True)


def picture(results: Path, rows: list[Row]) -> None:
    """Plot next to a result file; without matplotlib, print how to plot it later."""
    try:
        draw(results.with_suffix(".png"), rows)
    except UnsupportedError as e:
        later = f"crelle bench plot {results.with_suffix('.json').name}"
        err.print(f"the plot was not written: {e}; then run: {later}", highlight=False, markup=False, soft_wrap=True)


def draw(path: Path, rows: list[Row]) -> None:
    """Draw rows of one of our benchmarks as bars."""
    from crelle.plots import plot_bars

    first = rows[0]
    if "over_time" in first or "milliseconds_per_step" in first:
        from crelle.bench.load.serving_plot import plot_serving

        plot_serving(path, rows)
    elif "attention" in first:
        from crelle.bench.kernels.attention import plot_attention

        plot_attention(path, rows)
    elif "working_set" in first:  # gemv on the CPU
        labels = [f"{_size(r)}{r['scheme']} {r['working_set']} t{r['threads']}" for r in rows]
        bars = {"GB/s": _column(rows, "gb_per_s"), "roofline": _column(rows, "roofline_gb_per_s")}
        N, K = first["shape"]
        plot_bars(path, labels, bars, f"{N} x {K}, batch {first['batch']}, {first['isa']}", "GB/s")
    elif "tflops" in first:
        from crelle.bench.kernels.gemm_cuda import plot_gemm

        plot_gemm(path, rows)
    elif "baseline_microseconds" in first:  # gemv on a GPU
        labels = [f"{_size(r)}{r['scheme']}" for r in rows]
        bars = {"x to y": _column(rows, "speedup"), "x already encoded": _column(rows, "product_speedup")}
        bars = {name: values for name, values in bars.items() if any(values)}
        plot_bars(path, labels, bars, f"{first['device']}, batch {first['batch']}", f"speedup over {first['baseline']}")
    elif "milliseconds_per_token" in first:  # decode on a GPU
        labels = [f"{r['model']} {r['scheme']}" for r in rows]
        bars = {"ms per token": _column(rows, "milliseconds_per_token")}
        if all(r.get("read_ceiling_gb_per_s") for r in rows):
            bars["reading the weights once"] = [r["weight_bytes"] / r["read_ceiling_gb_per_s"] / 1e6 for r in rows]
        title = (
            f"decoding, {first['device']}, batch {first['batch']}, {first['tokens']} tokens after {first['context']}"
        )
        plot_bars(path, labels, bars, title, "ms")
    else:  # decode on the CPU
        labels = [f"{r['who']}, {r['threads']} threads" for r in rows]
        plot_bars(path, labels, {"decode": _column(rows, "decode_tokens_per_second")}, "decoding", "tokens per second")


def _size(row: Row) -> str:
    return "{}x{} ".format(*row["shape"])


def _column(rows: list[Row], key: str) -> list[float]:
    return [float(r[key] or 0.0) for r in rows]

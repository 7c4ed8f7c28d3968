"""crelle bench plot: the plot of a result file, also where the measuring machine has no matplotlib."""

from pathlib import Path
from typing import Annotated, Any

import typer

from crelle.cli.common.console import Json, err, out, print_json
from crelle.errors import FormatError, UnsupportedError

NAME = "plot"
Row = dict[str, Any]


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A result file that a benchmark wrote.")],
    to: Annotated[Path | None, typer.Option("--out", help="The plot to write; default: FILE with .png.")] = None,
    json: Json = False,
) -> None:
    """Plot a result file that gemv, gemm, decode, serve or attention wrote, on any machine.

    **Example**: `crelle bench plot bench/results/h200-gemv.json`
    """
    from crelle.formats.storage.io import read_json

    if not file.is_file():
        raise FormatError(f"{file} does not exist; give a .json file that `crelle bench … --out NAME` wrote")
    rows = read_json(file).get("rows")
    if not (isinstance(rows, list) and rows and all(isinstance(r, dict) for r in rows)):
        raise FormatError(f"{file} has no rows, so it is no result file of `crelle bench gemv` or `bench decode`")
    path = to or file.with_suffix(".png")
    try:
        draw(path, rows)
    except (KeyError, TypeError, ValueError) as e:
        raise FormatError(f"{file} has rows of a kind that cannot be plotted ({e})") from e
    if json:
        print_json({"picture": path.name})
    else:
        out.print(str(path), highlight=False, soft_wrap=True)


def picture(results: Path, rows: list[Row]) -> None:
    """Draw beside a result file; where matplotlib is absent, say how to have the picture later."""
    try:
        draw(results.with_suffix(".png"), rows)
    except UnsupportedError as e:
        later = f"crelle bench plot {results.with_suffix('.json').name}"
        err.print(f"no picture: {e}; then: {later}", highlight=False, markup=False, soft_wrap=True)


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
        bars = {"from x to y": _column(rows, "speedup"), "digits of x given": _column(rows, "product_speedup")}
        bars = {name: values for name, values in bars.items() if any(values)}
        plot_bars(
            path, labels, bars, f"{first['device']}, batch {first['batch']}", f"times as fast as {first['baseline']}"
        )
    elif "milliseconds_per_token" in first:  # decode on a GPU
        labels = [f"{r['model']} {r['scheme']}" for r in rows]
        bars = {"ms per token": _column(rows, "milliseconds_per_token")}
        if all(r.get("read_ceiling_gb_per_s") for r in rows):
            bars["its weights read once"] = [r["weight_bytes"] / r["read_ceiling_gb_per_s"] / 1e6 for r in rows]
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

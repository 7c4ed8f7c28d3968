"""Quality of binary coding over bits and groups: perplexity and LAMBADA accuracy, the papers' figures of (q, g).

    python bench/quality/bcq_quality.py OUT.json DATA [--model smollm2] [--only 'hbcq.*row'] [--device cuda] [--jobs 6]
    python bench/quality/bcq_quality.py OUT.json --draw                DATA: a folder with text/, tasks/ and stories15M/

grid         `bcq` (weights alone) and `hbcq` (calibrated) with 2 to 5 bits by groups of 32, 64, 128, 256 and a row
sub-layers   all matrices of attention with one number of bits, those of the feed-forward network with another, groups
             of 128

SmolLM2: WikiText-2 test, windows of 1024, 20,480 tokens, calibrated on 64 rows of 512 tokens of WikiText-2 valid, and
the first --limit items of LAMBADA. stories15M: TinyStories, windows of 256, 64 rows of 256 tokens, no LAMBADA: no story
of a child ends like its passages. Rows are added to OUT.json as they are done, and drawn into OUT.png.
"""

import argparse
import json
import multiprocessing
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from quality import CASES, Results, add_options, layer_bits

from crelle.engine.llm import LLM
from crelle.eval.perplexity import perplexity
from crelle.eval.smollm2 import smollm2
from crelle.eval.tasks.scoring import score_task, summarize
from crelle.eval.tasks.spec import find_task
from crelle.formats.storage.open import open_weights
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.run import quantize

METHODS, BITS, GROUPS = ("bcq", "hbcq"), (2, 3, 4, 5), ("32", "64", "128", "256", "row")
Row = dict[str, Any]


def cases() -> list[Row]:
    """Return the cells: the grid first."""
    grid = [
        {"part": "grid", "scheme": f"{m}:bits={q},group={g}", "method": m, "bits": q, "group": g}
        for m in METHODS
        for g in GROUPS
        for q in BITS
    ]
    parts = [
        {"part": "sub-layers", "scheme": f"{m}:bits={a}+{f},group=128", "method": m, "attention": a, "ffn": f}
        for m in METHODS
        for a in BITS
        for f in BITS
        if a != f  # the same bits are in the grid
    ]
    return grid + parts


def overrides(case: Row, source: Path) -> tuple[str, dict[str, str]]:
    """Return the scheme of the feed-forward network, and that of every matrix of attention where it is another."""
    if case["part"] == "grid":
        return case["scheme"], {}
    names = [n.removesuffix(".weight") for n in open_weights(source).names() if ".self_attn." in n]
    of = "{method}:bits={bits},group=128".format
    return of(method=case["method"], bits=case["ffn"]), dict.fromkeys(names, of(**case, bits=case["attention"]))


def quality(model: Path, name: str, data: Path, device: str, limit: int) -> Row:
    """Return perplexity, and accuracy on LAMBADA where the model was made for such text."""
    llm = LLM.load(model, device=device)
    file, context, tokens = CASES[name]["test"]
    text = (data / "text" / file).read_text()
    found: Row = {"perplexity": perplexity(llm, text, context=context, tokens=tokens).perplexity}
    if name == "smollm2" and limit:
        task = find_task("lambada_openai", data / "tasks")
        score = summarize(task, score_task(llm, task, limit=limit))
        found["lambada"] = asdict(score)
    return found


def one(case: Row, name: str, source: Path, data: Path, device: str, limit: int, threads: int) -> Row:
    """Quantize and evaluate one cell."""
    torch.set_num_threads(threads)
    begun, of = perf_counter(), CASES[name]
    text = (data / "text" / of["calib"]).read_text()
    scheme, others = overrides(case, source)
    calibration = CalibrationData(text=text, rows=of["rows"], length=of["length"]) if case["method"] == "hbcq" else None
    with tempfile.TemporaryDirectory() as d:
        made = quantize(source, Path(d) / "out", scheme, text=calibration, device=device, overrides=others)
        seconds = perf_counter() - begun
        row = {**case, "bits_per_weight": layer_bits(made.out), "seconds": seconds}
        return row | quality(made.out, name, data, device, limit)


def draw(path: Path) -> None:
    """Draw ratios of perplexity and accuracies over bits per weight, a line for each method and number of bits."""
    from crelle.plots import pyplot

    result = json.loads(path.read_text())
    plt = pyplot()
    grid = [r for r in result["rows"] if r["part"] == "grid"]
    parts = [r for r in result["rows"] if r["part"] == "sub-layers"]
    panels = ["ratio", *(["accuracy"] if any("lambada" in r for r in grid) else []), *(["sub-layers"] if parts else [])]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4.5), layout="constrained", squeeze=False)
    for ax, panel in zip(axes.flat, panels, strict=True):
        value = (lambda r: 100 * r["lambada"]["accuracy"]) if panel == "accuracy" else lambda r: r["ratio"]
        for i, method in enumerate(METHODS):
            for j, bits in enumerate(BITS):
                if panel == "sub-layers":
                    mine = [r for r in parts if r["method"] == method and r["attention"] == bits]
                    mine += [r for r in grid if (r["method"], r["bits"], r["group"]) == (method, bits, "128")]
                    label = f"{method}, attention {bits} bits"
                else:
                    mine = [r for r in grid if (r["method"], r["bits"]) == (method, bits)]
                    label = f"{method}, {bits} bits"
                points = sorted((r["bits_per_weight"], value(r)) for r in mine)
                if points:
                    style = {"color": f"C{j}", "linestyle": ("--", "-")[i], "marker": "os"[i], "markersize": 4}
                    ax.plot(*zip(*points, strict=True), label=label, linewidth=1, **style)
        if panel == "accuracy":
            ax.axhline(100 * result["fp32"]["lambada"]["accuracy"], color="black", linestyle=":", linewidth=1)
            ax.set(title="LAMBADA accuracy, %", xlabel="bits per weight")
        else:
            about = "colour: bits; along a line: groups, a row to 32"
            if panel == "sub-layers":
                about = "colour: bits of attention; along a line: of feed-forward"
            title = f"perplexity over full precision\n{about}"
            ax.set(title=title, xlabel="bits per weight", yscale="log")
        ax.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=7)
    figure.savefig(path.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--model", choices=list(CASES), default="smollm2")
    parser.add_argument("--source", type=Path, help="SmolLM2's GGUF file; default: the one that the demo keeps")
    parser.add_argument("--only", default="", help="a regular expression for schemes, like '^bcq.*row'")
    parser.add_argument("--limit", type=int, default=1000, help="items of LAMBADA; 0: none")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no cell after this long")
    parser.add_argument("--draw", action="store_true", help="only draw what OUT.json has")
    add_options(parser)
    args = parser.parse_args()
    if args.draw:
        draw(args.out)
        return
    if args.data is None:
        parser.error("name DATA, or --draw")
    source = args.source or (smollm2() if args.model == "smollm2" else args.data / "stories15M")
    options = f"--model {args.model} --limit {args.limit}"
    results = Results(args.out, f"python bench/quality/bcq_quality.py {args.out.name} DATA {options}")
    results.result["model"] = args.model
    if "fp32" not in results.result:
        results.result["fp32"] = quality(source, args.model, args.data, args.device, args.limit)
        print(results.result["fp32"], flush=True)
    wanted = [c for c in cases() if re.search(args.only, c["scheme"]) and not results.has(scheme=c["scheme"])]
    end = perf_counter() + 60 * args.minutes
    threads = max(1, torch.get_num_threads() // args.jobs)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        more = (args.model, source, args.data, args.device, args.limit, threads)
        running = [pool.submit(one, case, *more) for case in wanted]
        for done in as_completed(running):
            if perf_counter() > end:
                pool.shutdown(wait=False, cancel_futures=True)
            if done.cancelled():
                continue
            if error := done.exception():
                print(error, flush=True)
                continue
            row = done.result()
            row["ratio"] = row["perplexity"] / results.result["fp32"]["perplexity"]
            row["device"] = args.device
            results.add(row, "scheme", "bits_per_weight", "seconds", "perplexity", "ratio")
    draw(args.out)


if __name__ == "__main__":
    main()

"""Accuracy of SmolLM2 on zero-shot tasks after quantization, with the KL divergence from fp16 beside it.

    python bench/quality/zero_shot.py OUT.json DATA [--only rtn4,auto3] [--limit 300] [--device cuda] [--work DIR]
    python bench/quality/zero_shot.py --table OUT.json       DATA: a folder with tasks/*.jsonl and text/

Calibration sees WikiText-2 valid. A row is one recipe: all tasks item by item against fp16, then perplexity, KL and
agreement over WikiText-2 test (windows of 1024). It is added to OUT.json when it is done, and what OUT.json has is not
run again. With --work checkpoints stay there: a run that was killed goes on in the middle of a recipe. At the end, and
with --table, the rows are printed as tables in Markdown and drawn into OUT.png. The linears of this file are Q4_1
already (16 levels per 32 inputs): compare at 2 and 3 bits.
"""

import argparse
import json
import shutil
import tempfile
from math import sqrt
from pathlib import Path

from quality import Results, Row, chosen, crelle, run_cases, shared

CASES: dict[str, tuple[str, str, int]] = {  # line in the plot, scheme, calibration sequences of 512 tokens
    "fp16": ("fp16", "fp16", 0),
    **{f"rtn{b}": ("rtn", f"rtn:bits={b},group=64", 0) for b in (4, 3, 2)},
    **{f"gptq{b}": ("gptq", f"gptq:bits={b},group=64", 64) for b in (4, 3, 2)},
    "mixed-four25": ("mixed", "mixed:four=0.25,outliers=0.002", 64),
    "mixed-four10": ("mixed", "mixed:four=0.1,outliers=0", 64),
    "atom-w4a4kv4": ("atom w4a4kv4", "atom:w=4,a=4,kv=4", 128),
    "atom-w4a8kv4": ("atom w4a8kv4", "atom:w=4,a=8,kv=4", 128),
    **{f"auto{b}": ("auto", f"auto:bits={b}.35", 64) for b in (4, 3, 2)},
    **{f"auto{b}-full": ("auto, tune=full", f"auto:bits={b}.35,tune=full,end=END,own=1024", 128) for b in (4, 3, 2)},
}
TASKS = "piqa,arc_easy,winogrande,boolq"
CALIBRATION, TEXT = "wikitext2-valid-tokenised.txt", "wikitext2-test.txt"


def made(name: str, source: Path, args: argparse.Namespace) -> tuple[Path, str]:
    """Return a recipe's checkpoint, which may be there already, and the command that makes it."""
    _, scheme, rows = CASES[name]
    out = args.work / name
    options: tuple[object, ...] = ("--scheme", scheme.replace("END", str(args.end)))
    if rows:
        options += ("--calib", args.data / "text" / CALIBRATION, "--rows", rows, "--length", 512)
    if not out.exists():  # a checkpoint has its name when it is whole
        done = crelle("quantize", source, out, "--head", "none", *options, "--resume", *shared(args))
        (args.work / f"{name}.json").write_text(json.dumps(done))
    return out, f"crelle quantize SMOLLM2 OUT {' '.join(str(o).replace(f'{args.data}/', '') for o in options)}"


def run(name: str, source: Path, args: argparse.Namespace, results: Results) -> None:
    if results.has(name=name, limit=args.limit):
        return
    baseline, (model, command) = args.work / "fp16", made(name, source, args)
    against: tuple[object, ...] = () if name == "fp16" else ("--against", baseline)
    limit: tuple[object, ...] = () if args.limit is None else ("--limit", args.limit)
    tasks = ("--tasks", args.tasks, "--data", args.data / "tasks", *limit)
    # fp16's items are scored once. Each run reads a copy of them, because a file of results belongs to one process.
    scored = args.work / f"{name}-scored"
    if name != "fp16" and not scored.exists():
        shutil.copytree(args.work / "fp16-scored", scored)
    found = crelle("eval", model, *tasks, *against, "--results", scored, *shared(args))
    sizes = ("--context", 1024, "--tokens", args.tokens)
    text = crelle("eval", model, "--text", args.data / "text" / TEXT, *sizes, *against, *shared(args))
    facts = crelle("inspect", model)
    report = args.work / f"{name}.json"  # not there where a run was killed just before it
    told = " --against FP16" if against else ""
    row = {
        "name": name,
        "scheme": facts["scheme"],
        "bits_per_weight": facts["bits_per_weight"],
        "seconds": json.loads(report.read_text())["seconds"] if report.exists() else None,
        "limit": args.limit,
        "perplexity": text["perplexity"],
        "text": text,
        "tasks": found["tasks"],
        "commands": [
            command,
            f"crelle eval OUT --tasks {args.tasks} --data tasks{told} {' '.join(map(str, limit))}".rstrip(),
            f"crelle eval OUT --text {TEXT} {' '.join(map(str, sizes))}{told}",
        ],
    }
    results.add(row, "name", "bits_per_weight", "seconds", "perplexity")


def percent(value: float, error: float | None, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def mean(row: Row, *path: str) -> tuple[float, float]:
    """Return the mean over the tasks of a figure and its standard error: the tasks are independent of each other."""
    figures = list(row["tasks"].values())
    for key in path[:-1]:
        figures = [f[key] for f in figures]
    variance = sum((f["stderr"] or 0) ** 2 for f in figures)
    return sum(f[path[-1]] for f in figures) / len(figures), sqrt(variance) / len(figures)


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda r: list(CASES).index(r["name"]))


def tables(rows: list[Row]) -> str:
    """Return accuracies with standard errors, then differences from fp16 with p-values, as Markdown."""
    tasks = list(rows[0]["tasks"])
    head = ["recipe", "bits", *tasks, "mean", "mean − fp16", "KL mean", "KL 99%", "same top-1", "perplexity"]
    lines = [head, ["---"] * len(head)]
    for r in rows:
        line = [r["name"], f"{r['bits_per_weight']:.2f}"]
        line += [percent(r["tasks"][t]["accuracy"], r["tasks"][t]["stderr"]) for t in tasks]
        line.append(percent(*mean(r, "accuracy")))
        if found := r["text"].get("against"):
            line.append(percent(*mean(r, "against", "paired", "difference"), sign="+"))
            line += [f"{found[k]:.3g}" for k in ("kl_mean", "kl_p99")] + [f"{found['top1_agreement']:.1%}"]
        else:
            line += [""] * 4
        lines.append([*line, f"{r['perplexity']:.2f}"])
    normed = [t for t in tasks if rows[0]["tasks"][t]["accuracy_norm"] is not None]
    head = ["recipe", *(f"{t}, normalised" for t in normed), *(f"{t} − fp16 (p)" for t in tasks)]
    more = [head, ["---"] * len(head)]
    for r in rows:
        line = [r["name"], *(percent(r["tasks"][t]["accuracy_norm"], r["tasks"][t]["stderr_norm"]) for t in normed)]
        for t in tasks:
            pair = r["tasks"][t].get("against", {}).get("paired")
            line.append(f"{percent(pair['difference'], pair['stderr'], '+')} ({pair['p_value']:.2g})" if pair else "")
        more.append(line)
    return "\n\n".join("\n".join(f"| {' | '.join(line)} |" for line in table) for table in (lines, more))


def draw(path: Path, rows: list[Row]) -> None:
    """Draw each task, the mean and the divergence over bits per weight, a line a recipe; bars are standard errors."""
    from crelle.plots import pyplot

    plt = pyplot()
    tasks, full = list(rows[0]["tasks"]), next((r for r in rows if r["name"] == "fp16"), None)
    families: dict[str, list[Row]] = {}
    for r in rows:
        if r is not full:
            families.setdefault(CASES[r["name"]][0], []).append(r)
    figure, axes = plt.subplots(2, 3, figsize=(14, 8), layout="constrained")

    def value(r: Row, panel: str) -> tuple[float, float]:
        if panel == "mean":
            return mean(r, "accuracy")
        return r["tasks"][panel]["accuracy"], r["tasks"][panel]["stderr"]

    for ax, panel in zip(axes.flat, [*tasks, "mean"], strict=False):
        for i, (kind, of_kind) in enumerate(families.items()):
            points = sorted((r["bits_per_weight"], *value(r, panel)) for r in of_kind)
            x, y, error = ([100 * v for v in p] if j else list(p) for j, p in enumerate(zip(*points, strict=True)))
            x = [b + 0.02 * (i - len(families) / 2) for b in x]  # so that bars stand beside each other
            ax.errorbar(x, y, error, marker="o", markersize=4, capsize=3, linewidth=1, label=kind)
        if full is not None:
            y, error = (100 * v for v in value(full, panel))
            ax.axhline(y, color="black", linestyle="--", linewidth=1, label="fp16")
            ax.axhspan(y - error, y + error, color="black", alpha=0.08)
        ax.set(title=f"{panel}: accuracy, %", xlabel="bits per weight")
        ax.grid(alpha=0.3)
    last = axes.flat[len(tasks) + 1]
    for kind, of_kind in families.items():
        points = sorted((r["bits_per_weight"], r["text"]["against"]["kl_mean"]) for r in of_kind)
        last.plot(*zip(*points, strict=True), marker="o", markersize=4, label=kind)
    last.set(title="KL divergence from fp16, nats per token", xlabel="bits per weight", yscale="log")
    last.grid(alpha=0.3)
    last.legend(fontsize=8)
    items = ", ".join(f"{t} {rows[0]['tasks'][t]['items']}" for t in tasks)
    figure.suptitle(f"SmolLM2-135M-Instruct, zero-shot ({items} items); bars: one standard error")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def show(path: Path) -> None:
    rows = in_order(json.loads(path.read_text())["rows"])
    print(tables(rows))
    draw(path.with_suffix(".png"), rows)


def main() -> None:
    from crelle.eval.smollm2 import smollm2

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print and draw what a result file has")
    parser.add_argument("--only", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--tasks", default=TASKS, help=f"default: {TASKS}; also arc_challenge, lambada_openai")
    parser.add_argument("--limit", type=int, help="the first items of each task; default: all")
    parser.add_argument("--tokens", type=int, default=20480, help="of the text")
    parser.add_argument("--end", type=int, default=1500, help="training steps of the recipes with tune=full")
    parser.add_argument("--model", type=Path, help="SmolLM2's GGUF file; default: the one that the demo keeps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="recipes at a time, which share the cores")
    parser.add_argument(
        "--work", type=Path, help="a folder for checkpoints and items, which stay; default: a temporary"
    )
    args = parser.parse_args()
    if args.table:
        show(args.table)
        return
    if args.out is None or args.data is None:
        parser.error("name OUT.json and DATA, or a file with --table")
    names, source = chosen(args.only, CASES), args.model or smollm2()
    tasks = "" if args.tasks == TASKS else f" --tasks {args.tasks}"
    results = Results(args.out, f"python bench/quality/zero_shot.py OUT.json DATA{tasks}")
    with tempfile.TemporaryDirectory() as d:
        args.work = args.work or Path(d)
        args.work.mkdir(parents=True, exist_ok=True)
        if todo := [n for n in names if n != "fp16" and not results.has(name=n, limit=args.limit)]:
            if not (args.work / "fp16-scored").exists():  # what the others are compared with
                results.result["rows"] = [r for r in results.rows if r["name"] != "fp16"]
            run("fp16", source, args, results)
            run_cases(todo, lambda name: run(name, source, args, results), args.jobs)
        elif "fp16" in names:
            run("fp16", source, args, results)
    show(args.out)


if __name__ == "__main__":
    main()

"""The tables of docs/notes/engine.md, "On a GPU", from the result files: printed, or put in their places.

    python bench/engine_tables.py [--write]

A table stands between <!-- NAME --> and <!-- end -->; NAME is one of TABLES, which says the result file. Tables without
a file, or of which a file has no rows, stay.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crelle.bench.load.serving_plot import scheme_label

RESULTS, DOCS = Path(__file__).parent / "results", Path(__file__).parent.parent / "docs" / "notes" / "engine.md"
Row = dict[str, Any]
WEIGHTS = {"fp16": "16", "rtn:bits=4,group=128": "4", "bcq:bits=3,group=128": "3"}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bits(row: Row) -> str:
    return f"{WEIGHTS.get(row['scheme'], scheme_label(row['scheme']))}, {row['kv'].removeprefix('kv')}"


def attention(result: Row) -> str:
    """Our microseconds for each cache, and in brackets the times of cuDNN and flash over ours."""
    lines = dict[str, list[str]]()
    for row in map(_attention_times, result["rows"]):
        line = lines.setdefault(f"{row['heads']}/{row['kv_heads']}, {row['batch']} x {row['context']}", [])
        if not line:
            line += [f"{row['cudnn_us']:.0f}", f"{row['flash_us']:.0f}"]
        line.append(f"{row['us']:.1f} ({row['times_cudnn']:.2f}, {row['times_flash']:.2f})")
    head = ["heads, sequences x tokens", "cuDNN us", "flash us", *(f"ours, {bits} bits" for bits in (16, 8, 4))]
    return table(head, [[name, *line] for name, line in lines.items()])


def _attention_times(row: Row) -> Row:
    """Return a row of `crelle bench attention` with the times and ratios of the table; older files have them."""
    if "us" in row:
        return row
    ours, torch = row["microseconds"], row["torch_microseconds"]
    times = {f"{name}_us": torch[name] for name in ("cudnn", "flash")}
    return {**row, "us": ours, **times, **{f"times_{name}": torch[name] / ours for name in ("cudnn", "flash")}}


def serve(result: Row) -> str:
    """Weights and cache by batch, tokens per second; then within the cap."""
    rows = result["rows"]
    free, capped = [r for r in rows if not r["memory"]], best_within(rows)
    batches = sorted({r["batch"] for r in free})
    lines = []
    for cap in capped:
        mine = {r["batch"]: r for r in free if bits(r) == bits(cap)}
        speeds = [f"{mine[n]['tokens_per_second']:.0f}" if n in mine else "–" for n in batches]
        within = f"{cap['tokens_per_second']:.0f} with {cap['batch']} sequences"
        lines.append([bits(cap), *speeds, within, f"{cap['times_fp16']:.2f}"])
    memory = capped[0]["memory"]
    return table(["weights, cache", *map(str, batches), f"within {memory}", "times 16, 16 there"], lines)


def trace(result: Row) -> str:
    """Weights, cache and memory; throughput, waits and what the cache held."""

    def waits(p: Row | None, unit: float, form: str) -> str:
        return "–" if p is None else " / ".join(form.format(unit * p[k]) for k in ("p50", "p90", "p99"))

    lines = []
    for r in result["rows"]:
        speed = [f"{r[which]:.0f}" for which in ("tokens_per_second", "late_tokens_per_second")]
        speed.append(f"{r['requests_per_second']:.1f}")
        waited = [waits(r["first_token"], 1, "{:.2f}"), waits(r["per_token"], 1e3, "{:.0f}")]
        cache = [str(r["most_running"]), f"{r['mean_pages'] / r['pages']:.0%}", str(r["preemptions"])]
        lines.append([bits(r), r["memory"], *speed, *waited, *cache])
    waiting = ["first token s, p50 / p90 / p99", "ms a token, p50 / p90 / p99"]
    speeds = ["tokens/s", "in the later half", "requests/s"]
    head = ["weights, cache", "memory", *speeds, *waiting, "sequences at most", "pages used", "preempted"]
    return table(head, lines)


def budget(result: Row) -> str:
    """What each kind of weights and cache gives within a memory budget: the best of its batches."""
    lines = []
    for r in best_within(result["rows"]):
        sizes = [f"{r[key] / 1e9:.2f}" for key in ("weight_bytes", "cache_bytes", "peak_memory_bytes")]
        times = [f"{r[key]:.2f}" if key in r else "–" for key in ("times_fp16", "times_w8a8")]
        lines.append([named(r), str(r["batch"]), *sizes, f"{r['tokens_per_second']:.0f}", *times])
    head = ["weights, cache", "sequences", "weights GB", "cache GB", "peak GB", "tokens/s", "times FP16", "times W8A8"]
    return table(head, lines)


def batches(result: Row) -> str:
    """Milliseconds of a step, and tokens per second, by batch."""
    rows = [r for r in result["rows"] if not r["memory"]]
    sizes = sorted({r["batch"] for r in rows})
    lines: dict[str, dict[int, str]] = {}
    for r in rows:
        shown = f"{r['milliseconds_per_step']:.2f}, {r['tokens_per_second']:.0f}"
        lines.setdefault(named(r), {})[r["batch"]] = shown
    several = {name: line for name, line in lines.items() if len(line) > 1}
    return table(["ms, tokens/s", *map(str, sizes)], [[n, *(m.get(b, "–") for b in sizes)] for n, m in several.items()])


def step(result: Row) -> str:
    """Where the time of a step goes."""
    rows = [r for r in result["rows"] if r.get("breakdown")]
    kinds = list(rows[0]["breakdown"]["milliseconds"]) if rows else []
    lines = []
    for r in rows:
        found = r["breakdown"]
        each = [f"{ms:.2f} ({ms / found['profiled_ms']:.1%})" for ms in found["milliseconds"].values()]
        times = [f"{ms:.2f}" for ms in (r["milliseconds_per_step"], r["graph_ms"], found["profiled_ms"])]
        lines.append([f"{named(r)}, {r['batch']}", *times, *each])
    return table(["weights, cache, batch", "step ms", "graph", "profiled", *kinds], lines) if lines else ""


def best_within(rows: list[Row]) -> list[Row]:
    """Return of each kind of weights and cache the batch that gave the most within its budget."""
    best: dict[str, Row] = {}
    for r in rows:
        if r["memory"] and r["tokens_per_second"] > best.get(named(r), {"tokens_per_second": 0})["tokens_per_second"]:
            best[named(r)] = r
    return list(best.values())


def named(row: Row) -> str:
    return f"{scheme_label(row['scheme'])}, {row['kv']}"


TABLES: dict[str, tuple[str, Callable[[Row], str]]] = {
    "h200-attention": ("h200-attention", attention),
    "h200-serve": ("h200-serve", serve),
    "h200-trace": ("h200-trace", trace),
    "h200-serve-atom-batches": ("h200-serve-atom", batches),
    "h200-serve-atom-budget": ("h200-serve-atom", budget),
    "h200-serve-atom-step": ("h200-serve-atom", step),
    "h200-trace-atom": ("h200-trace-atom", trace),
}


def main(write: bool) -> None:
    text = DOCS.read_text()
    for name, (file, make) in TABLES.items():
        path = RESULTS / f"{file}.json"
        if not path.is_file():
            continue
        made = make(json.loads(path.read_text()))
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        if mark and made:
            text = before + mark + made + "\n<!-- end -->" + rest.partition("<!-- end -->")[2]
        if not write:
            print(f"{name}\n{made}\n")
    if write:
        DOCS.write_text(text)


if __name__ == "__main__":
    main("--write" in sys.argv)

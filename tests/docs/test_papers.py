"""docs/papers.md: our figures are those of the result files that it names."""

import json
import re
from typing import Any

import pytest
from conftest import ROOT

PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
RESULTS = ROOT / "bench" / "results"


def rows(name: str) -> list[dict[str, Any]]:
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert f"{name}.json" in PAGE, f"{name}.json is not named"
    return list(found.get("rows") or found["results"])


def section(title: str) -> str:
    (found,) = re.findall(rf"^##+ {re.escape(title)}.*?\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.mark.parametrize("row", rows("h200-gemv"), ids=lambda r: f"{r['scheme']}-{r['shape']}")
def test_products(row: dict[str, Any]) -> None:
    n, k = row["shape"]
    if (n, k) == (11008, 4096):
        return
    us, times = f"{row['microseconds']:.2f}", f"{row['speedup']:.2f}"
    if n == 49152:
        assert f"| {us} | {times} |" in section("Table 1: first FFN layer")
    else:
        assert f"{us} ({times})" in section("Table 2: products over cuBLAS")


def test_whole_steps() -> None:
    table = section("Tables 3, 6 and 7: whole models")
    for name in ("llama2-7b", "llama-30b", "llama-65b", "opt-30b", "opt-66b"):
        found = {r["scheme"]: f"{r['milliseconds_per_token']:.2f}" for r in rows(f"h200-decode-{name}")}
        assert f"| {found['bcq:bits=4,group=128']} | {found['bcq:bits=3,group=128']} | [{name}]" in table
    (big,) = rows("h200-decode-opt-175b")
    part = section("Tables 4, 5 and 9: OPT-175B on one GPU")
    assert f"**{big['milliseconds_per_token']:.1f}** ms, {big['joules_per_token']:.1f} J" in part
    assert f"{big['weight_bytes'] / 1e9:.1f} GB" in part
    assert f"{big['peak_memory_bytes'] / 1e9:.1f} GB" in part


def test_mixed() -> None:
    table = section("Figure 9: the product")
    for row in rows("h200-mixed-gemv"):
        assert f" {row['speedup']:.2f} |" in table
    fp16, ours = rows("h200-mixed-llama2-7b")
    table = section("Table 3: whole steps and their cost")
    cost = fp16["cost"]["total"] / ours["cost"]["total"]
    assert f"| {ours['tokens_per_second']:.1f} | {ours['speedup']:.2f} | {cost:.2f} times less" in table
    table = section("Table 4: 4-bit groups")
    for name, digits in (("h200-mixed-ablation-smollm2", 2), ("mixed-ablation-stories15M", 3)):
        for row in rows(name):
            if row["name"].split()[-1] in ("sensitivity", "random", "inter-layer"):
                assert f" {row['ratio']:.{digits}f} |" in table, row["name"]


def test_atom_quality() -> None:
    table = section("Table 4: part by part")
    ours, small = rows("h200-atom-ablation-smollm2")[1:], rows("atom-ablation-stories15M")[1:]
    for a, b in zip(ours, small, strict=True):
        assert f"| {a['ratio']:.3f} | {b['ratio']:.3f} |" in table, a["name"]
    measured = {(r["name"], r["kv"], r["text"]): r["ratio"] for r in rows("h200-atom-quality-smollm2")}
    text = section("Tables 1 to 3: quality")
    for name, kv in (("w4a4kv4", "4"), ("w4a4kv4-rows512", "4"), ("w4a8", "16"), ("w4a8", "4"), ("w3a3", "16")):
        assert f"{measured[name, kv, 'wikitext2-test.txt']:.3f}" in text


def test_atom_speed() -> None:
    table = section("Figure 10: products and attention")
    for row in rows("h200-integer-gemm"):
        if row["rows"] == 512 and row["scheme"] != "atom-w4a8":
            best = min(row["microseconds"])
            assert f"| {best:.1f} | {min(row['cublas']) / best:.2f} |" in table, row
    us = {
        r["cache"]: r["us"]
        for r in rows("h200-attention")
        if (r["batch"], r["context"], r["kv_heads"]) == (128, 1024, 32)
    }
    assert f"**{us['kv16'] / us['kv4']:.2f} and {us['kv8'] / us['kv4']:.2f}**" in table
    table = section("Figure 11: throughput and latency")
    limited = [r for name in ("h200-serve-atom", "h200-serve-atom-hadamard") for r in rows(name) if r["memory"]]
    shown = [r for r in limited if f"| {r['batch']} | {r['tokens_per_second']:.0f} |" in table]
    assert len(shown) == 6
    assert all(f"{r['times_fp16']:.2f}" in table or r["scheme"] == "fp16" for r in shown)
    for row in rows("h200-trace-atom"):
        assert f"{row['tokens_per_second']:.0f}" in table


def test_a_step_by_part() -> None:
    table = section("Figure 3: where a step's time goes")
    parts = [r["breakdown"] for n in ("h200-serve-atom", "h200-serve-atom-hadamard") for r in rows(n) if r["breakdown"]]
    assert len(parts) == 5
    for part in parts:
        whole, ms = part["profiled_ms"], part["milliseconds"]
        shares = " | ".join(f"{100 * ms[name] / whole:.0f}%" for name in ("attention", "gemm", "encode", "append"))
        assert f"| {whole:.2f} | {shares} |" in table


def test_every_machine_of_theirs_is_named() -> None:
    parts = re.split(r"(?m)^(?=##)", PAGE)
    told = [p for p in parts if re.search(r"^\|.*\b(theirs|claimed)\b", p, re.MULTILINE)]
    assert len(told) >= 12
    for part in told:  # speed has a GPU, quality a model
        assert re.search(r"A100|RTX \d+|Llama|LLaMA|OPT", part), part.splitlines()[0]
        if re.search(r"theirs.*(ms|us|tokens/s|speed-up)", part):
            assert re.search(r"A100|RTX \d+", part), part.splitlines()[0]


def test_row_wise_products_and_w4a16() -> None:
    table = section("Table 2: products over cuBLAS")
    pairs = [r for r in rows("h200-gemv-pairs") if "group=row" in r["scheme"]]
    assert len(pairs) == 3
    for row in pairs:
        assert f"| {row['microseconds']:.2f} ({row['speedup']:.2f}) |" in table
    (w4a16,) = (
        r for r in rows("h200-serve") if r["memory"] and (r["scheme"], r["kv"]) == ("rtn:bits=4,group=128", "kv16")
    )
    table = section("Figure 11: throughput and latency")
    assert f"| {w4a16['batch']} | {w4a16['tokens_per_second']:.0f} |" in table


def test_outliers_and_bits() -> None:
    table = section("Table 4: 4-bit groups")
    for name in ("h200-mixed-ablation-smollm2", "mixed-ablation-stories15M"):
        ratio = {r["name"]: f"{r['ratio']:.3f}" for r in rows(name)}
        for share in ("0.002", "0.005"):
            assert f"{ratio[f'outliers={share} 2-bit groups']} and {ratio[f'outliers={share} all groups']}" in table
    table = section("Table 4: part by part")
    for a, b in zip(rows("h200-atom-ablation-smollm2")[1:], rows("atom-ablation-stories15M")[1:], strict=True):
        assert f"| {a['bits_per_weight']:.2f}, {b['bits_per_weight']:.2f} |" in table
    found = {r["name"]: r["perplexity"] for r in rows("h200-zero-shot-smollm2")}
    part = section("Tables 3, 6 and 7: whole models")
    assert all(f"{found[name]:.2f}" in part for name in ("fp16", "rtn3", "auto3", "auto3-full"))

"""Figures of docs/results.md, docs/notes/zero-shot.md and README.md are those of the result files beside them."""

import json
import re
from typing import Any

from conftest import ROOT

RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
TASKS = (ROOT / "docs" / "notes" / "zero-shot.md").read_text(encoding="utf-8")


def rows(name: str) -> list[dict[str, Any]]:
    found = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return list(found["rows"])


def line(page: str, name: str) -> str:
    """Return the line that links a result file."""
    (found,) = (text for text in page.split("\n") if f"{name}.json" in text)
    return found


def test_first_tokens() -> None:
    table = RESULTS.split("## GPU: first token")[1]
    found = rows("h200-engine-first-token")
    file = json.loads((ROOT / "bench" / "results" / "h200-engine-first-token.json").read_text(encoding="utf-8"))
    assert [r["scheme"] for r in found] == ["fp16", "rtn:bits=4,group=128", "atom:w=4,a=8,levels=2"]
    for tokens, shown in (("128", "128"), ("1024", "1,024"), ("4000", "4,000")):
        each = [*(r["first_token_milliseconds"][tokens] for r in found), file["cublas_linears_milliseconds"][tokens]]
        assert f"| {shown} tokens | {' | '.join(f'{ms:.1f}' for ms in each)} |" in table
    _, four, integer = (f"{r['milliseconds_per_token']:.2f}" for r in found)
    assert f"one stream at {integer} ms per token, 4 bits at {four}" in table


def test_small_model() -> None:
    fp16, *quantized = (f"{r['milliseconds_per_token']:.3f}" for r in rows("h200-engine-smollm2"))
    shown = line(RESULTS, "h200-engine-smollm2")
    assert f"| {' / '.join(quantized)} ms per token" in shown
    assert f"| fp16: {fp16} |" in shown


def test_clients() -> None:
    found = {r["scheme"]: r for r in rows("h200-serve-64-clients")}
    fp16, four, integer = (found[s] for s in ("fp16", "rtn:bits=4,group=128", "atom:w=4,a=8,levels=2"))
    rate, share = ({id(r): r[key] for r in found.values()} for key in ("tokens_per_second", "prefill_share"))
    shown = line(RESULTS, "h200-serve-64-clients")
    assert f"| {rate[id(integer)]:,.0f} / {rate[id(four)]:,.0f} tokens/s" in shown
    assert f"{100 * share[id(integer)]:.0f} / {share[id(four)]:.0%} of the time in prompts" in shown
    assert f"| fp16: {rate[id(fp16)]:,.0f}; {share[id(fp16)]:.0%} |" in shown
    readme = line((ROOT / "README.md").read_text(encoding="utf-8"), "h200-serve-64-clients")
    assert f"`atom:w=4,a=8,levels=2` | – | {rate[id(integer)]:,.0f} | fp16: {rate[id(fp16)]:,.0f} |" in readme


def test_row_wise_opt_and_efforts() -> None:
    (row,) = (r for r in rows("h200-papers-opt") if (r["model"], r["scheme"]) == ("opt-175b", "bcq:bits=3,group=row"))
    bytes_, joules = (row["weight_bytes"] / 1e9, row["peak_memory_bytes"] / 1e9), row["joules_per_token"]
    shown = line(RESULTS, "h200-papers-opt")
    assert (
        "{:.1f} ms; {:.1f} GB, {:.1f} GB peak; {:.1f} J".format(row["milliseconds_per_token"], *bytes_, joules) in shown
    )
    efforts = sorted(rows("h200-effort-smollm2"), key=lambda r: -float(r["bits"]))
    balanced = [r for r in efforts if r["effort"] == "balanced"]
    shown = line(RESULTS, "h200-effort-smollm2")
    assert "{} / {} / {} bits".format(*(r["bits"] for r in balanced)) in shown
    assert "({:.3f} / {:.3f} / {:.3f} times".format(*(r["test_ratio"] for r in balanced)) in shown
    seconds = [r[key] for key in ("seconds", "estimated_seconds") for r in balanced]
    assert "{:.0f} / {:.0f} / {:.0f} s; estimates {:.0f} / {:.0f} / {:.0f}".format(*seconds) in shown
    best = [r for r in efforts if r["effort"] == "best"]
    (shown,) = (text for text in RESULTS.split("\n") if text.startswith("| the same, `best`"))
    assert "({:.3f} / {:.3f} / {:.3f})".format(*(r["test_ratio"] for r in best)) in shown
    seconds = [r[key] for key in ("seconds", "estimated_seconds") for r in best]
    assert "{:.0f} / {:.0f} / {:.0f} s; estimates {:.0f} / {:.0f} / {:.0f}".format(*seconds) in shown
    name = "h200-quantize-default-smollm2"
    plain = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))["repeated"]["runs"]
    seconds = [r[key] for key in ("seconds", "estimated_seconds") for r in plain]
    assert "| {:.0f} and {:.0f} s; estimates {:.0f} and {:.0f} |".format(*seconds) in RESULTS


def test_trellis() -> None:
    found = {(r["scheme"], r["shape"][0]): r for r in rows("h200-trellis")}
    notes = (ROOT / "docs" / "notes" / "cuda-kernels.md").read_text(encoding="utf-8")

    def times(scheme: str, n: int, key: str) -> float:
        r = found[scheme, n]
        return float(r["baseline_microseconds"] / r[key])

    pair = [f"trellis:bits={bits},code=pair" for bits in (2, 3, 4)]
    for bits, scheme in zip((2, 3, 4), pair, strict=True):
        cells = " | ".join(
            f"{times(scheme, n, 'product_microseconds'):.2f} ({times(scheme, n, 'microseconds'):.2f})"
            for n in (4096, 12288, 49152)
        )
        assert f"| `pair`, {bits} bits | {cells} |" in notes
    shown = line(RESULTS, "h200-trellis")
    whole, alone = (
        " / ".join(f"{times(s, 12288, k):.1f}" for s in pair) for k in ("microseconds", "product_microseconds")
    )
    assert f"{whole} times ({alone})" in shown
    two = {r["scheme"]: r for r in rows("trellis-quality-smollm2")}["trellis:bits=2"]
    assert f"{two['test_ratio']:.2f} / {two['unseen_ratio']:.2f}" in line(RESULTS, "trellis-quality-smollm2")
    quality = sorted(rows("h200-prefer-quality-smollm2"), key=lambda r: r["target"])
    untrained = [r for r in quality if "tune=none" in r["scheme"]]
    assert [r["target"] for r in untrained] == [2.35, 3.35, 4.35]
    shown = line(RESULTS, "h200-prefer-quality-smollm2")
    for key in ("test_ratio", "unseen_ratio"):
        assert " / ".join(f"{r[key]:.3f}" for r in untrained) in shown
    trained = [r for r in quality if "tune=full" in r["scheme"]]
    for r in trained:
        assert f"{r['test_ratio']:.3f} ({r['unseen_ratio']:.3f})" in shown


def test_fp4_experts_and_speculation() -> None:
    found = {(r["scheme"], r["shape"][0]): r for r in rows("h200-fp4")}
    shown = line(RESULTS, "h200-fp4")
    each = []
    for scheme in ("mxfp4", "nvfp4"):
        r = found[scheme, 12288]
        (config,) = (c for c in r["configs"] if list(c["config"].values()) == [1, 8, 3, 2])
        each.append(f"{r['baseline_microseconds'] / config['microseconds']:.1f}")
    assert f"| {' / '.join(each)} times" in shown
    one, many = rows("h200-experts")
    assert (one["batch"], many["batch"]) == (1, 64)
    rates = f"| {one['tokens_per_second']:.0f} / {many['tokens_per_second']:,.0f} tokens/s"
    assert rates in line(RESULTS, "h200-experts")
    exact = [r for r in rows("h200-speculation-ngram") if r["exact"]]
    assert [r["prompts"] for r in exact] == ["summary", "edit", "prose"]
    times = " / ".join(f"{r['speedup']:.1f}" for r in exact)
    assert f"| {times} times |" in line(RESULTS, "h200-speculation-ngram")
    (draft,) = (r for r in rows("h200-speculation-draft") if r["exact"])
    assert f"| {draft['speedup']:.2f} times |" in line(RESULTS, "h200-speculation-draft")


def test_language_tasks() -> None:
    names = {"fp16": "fp16 | 16.00", "rtn4": "rtn | 4.32", "rtn3": "rtn | 3.30", "gptq4": "gptq | 4.32"}
    names |= {"gptq3": "gptq | 3.30", "gptq2": "gptq | 2.29", "mixed-four25": "mixed | 2.97"}
    found = {r["name"]: r for r in rows("h200-zero-shot-language-smollm2")}
    assert found.keys() == names.keys()
    for name, start in names.items():
        (shown,) = (text for text in TASKS.split("\n") if text.startswith(f"| {start} |"))
        scores = (100 * found[name]["tasks"][task]["accuracy"] for task in ("lambada_openai", "arc_challenge"))
        assert shown.endswith("| {:.2f} | {:.1f} | {:.1f} |".format(found[name]["perplexity"], *scores))
    for name in ("gptq4", "gptq3"):
        pair = found[name]["tasks"]["lambada_openai"]["against"]["paired"]
        assert f"−{-100 * pair['difference']:.1f} ± {100 * pair['stderr']:.1f}" in TASKS
    assert re.search(r"below chance \(22\.2\)", TASKS)
    assert 100 * found["fp16"]["tasks"]["arc_challenge"]["accuracy"] == 22.2


def test_beside_ik_llama() -> None:
    for name in ("cpu-vnni-shape-4bit", "cpu-vnni-shape-trellis", "cpu-amx-shape-trellis"):
        ours, theirs = (r for r in rows(name) if r["threads"] == 2)
        pairs = [f"{r['decode_tokens_per_second']:.0f} / {r['prefill_tokens_per_second']:.0f}" for r in (ours, theirs)]
        shown = line(RESULTS, name)
        assert f"| {pairs[0]} |" in shown
        assert pairs[1] in shown


def test_beside_llama_without_amx() -> None:
    for name in ("cpu-avx2-decode-{}bit", "cpu-vnni-again-{}bit", "cpu-avx2-shape-{}bit", "cpu-vnni-llama-{}bit"):
        shown = line(RESULTS, name.format(4))
        for i in (0, 1):
            each = [rows(name.format(bits))[i] for bits in (4, 3, 2)]
            pairs = [f"{r['decode_tokens_per_second']:,.0f} / {r['prefill_tokens_per_second']:,.0f}" for r in each]
            assert ", ".join(pairs) in shown
    one, sixteen = (rows("cpu-vnni-16-clients")[i::2] for i in (0, 1))
    pairs = [f"{a['tokens_per_second']:.0f} / {b['tokens_per_second']:.0f}" for a, b in zip(one, sixteen, strict=True)]
    assert ", ".join(pairs) in line(RESULTS, "cpu-vnni-16-clients")

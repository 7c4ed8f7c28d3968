"""docs/papers.md: our figures are those of the result files that it names."""

import json
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
RESULTS = ROOT / "bench" / "results"


JOULES = "joules_per_token"
GROUPS_OF_128 = ("bcq:bits=4,group=128", "bcq:bits=3,group=128")


def result(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def rows(name: str) -> list[dict[str, Any]]:
    found = result(name)
    assert f"{name}.json" in PAGE, f"{name}.json is not named"
    return list(found.get("rows") or found["results"])


def section(title: str) -> str:
    (found,) = re.findall(rf"^##+ {re.escape(title)}.*?\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def bits_of(row: dict[str, Any]) -> int:
    return int(re.findall(r"bits=(\d)", row["scheme"])[0])


def time_and_size(row: dict[str, Any]) -> tuple[str, str]:
    """Return milliseconds of a token, and gigabytes."""
    return f"{row['milliseconds_per_token']:.2f}", f"{row['weight_bytes'] / 1e9:.1f}"


def timed(row: dict[str, Any]) -> str:
    return f"{row['microseconds']:.2f} ({row['speedup']:.2f})"


def products() -> dict[tuple[int, int, int, str], dict[str, Any]]:
    """Return binary-coded products by outputs, inputs, bits and group."""
    found = rows("h200-papers-products")
    ours = {(*r["shape"], bits_of(r), re.findall(r"group=(\w+)", r["scheme"])[0]): r for r in found}
    assert len(ours) == len(found) == 136
    return ours


def steps() -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["model"], r["scheme"]): r for r in rows("h200-papers-opt")}


def line(some: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Return microseconds at no bytes, microseconds per MB, and R² of the line through products."""
    x, y = np.array([r["bytes"] / 1e6 for r in some]), np.array([r["microseconds"] for r in some])
    slope, start = np.polyfit(x, y, 1)
    return float(start), float(slope), float(np.corrcoef(x, y)[0, 1] ** 2)


def front(some: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that no other one of as few bits per weight matches."""
    best: list[dict[str, Any]] = []
    for row in sorted(some, key=lambda r: (float(r["bits_per_weight"]), float(r["ratio"]))):
        if not best or row["ratio"] < best[-1]["ratio"]:
            best.append(row)
    return best


def test_the_first_ffn_layer() -> None:
    table = section("Table 1: first FFN layer")
    ours = products()
    uniform = {r["scheme"]: r for r in rows("h200-gemv") if r["shape"] == [49152, 12288] and r["scheme"][:3] == "rtn"}
    tables = {(r["scheme"], r["variant"]): r for r in rows("h200-papers-look-up") if r["shape"] == [49152, 12288]}
    for bits in (2, 3, 4):
        (even,) = (timed(r) for scheme, r in uniform.items() if f"bits={bits}" in scheme)
        lut = {v: r for (scheme, v), r in tables.items() if f"bits={bits}" in scheme}
        assert f"| {timed(ours[49152, 12288, bits, '128'])} | {even} | {timed(lut['shared'])} |" in table
        assert f"{lut['private']['speedup']:.2f}" in table.split("private bank")[1]
    assert f"| {timed(ours[49152, 12288, 3, 'row'])} |" in table
    assert f"| row-wise {timed(ours[49152, 12288, 8, 'row'])} |" in table
    fp16 = (r["baseline_microseconds"] for r in (ours[49152, 12288, 2, "row"], *uniform.values(), *tables.values()))
    assert {f"{us:.1f}" for us in fp16} == set(
        re.findall(r"\d+\.\d", table.split("cuBLAS fp16 |")[1].split("\n")[0][8:])
    )


def test_products() -> None:
    table, ours = section("Figures 8 and 9 of 2023"), products()
    for n, k in dict.fromkeys((n, k) for n, k, _, _ in ours):
        cells = [ours[n, k, 2, "row"]["baseline_microseconds"]]
        lists = [[ours[n, k, bits, "row"] for bits in range(1, 9)]]
        lists += [[ours[n, k, bits, group] for bits in (2, 3, 4)] for group in ("128", "64", "32")]
        shown = " | ".join([f"{cells[0]:.1f}", *(", ".join(f"{r['speedup']:.2f}" for r in some) for some in lists)])
        assert f"| {n} × {k} | {shown} |" in table
    squares = [ours[12288, 12288, 3, group]["microseconds"] for group in ("32", "64", "128", "row")]
    assert "{:.2f}, {:.2f}, {:.2f} and {:.2f} us".format(*squares) in table
    odd = [ours[12288, 49152, bits, "64"]["microseconds"] for bits in (2, 3)]
    assert "take {:.2f} us, 3 bits {:.2f}".format(*odd) in table
    table = section("Table 2: products over cuBLAS")
    for n in (4096, 7168, 12288):
        assert f"| {', '.join(timed(ours[n, n, bits, 'row']) for bits in (2, 3, 4, 5))} |" in table
    fp16, two = ours[12288, 12288, 2, "row"]["baseline_microseconds"], ours[12288, 12288, 2, "row"]
    assert f"{fp16:.1f} us, {2 * 12288**2 / fp16 / 1e6:.2f} TB/s" in table
    assert f"{two['gb_per_s'] / 1e3:.2f} TB/s at 2 bits" in table


def test_latency_over_bytes() -> None:
    part, every = section("Figures 8 and 9 of 2023"), list(products().values())
    start, slope, r2 = line(every)
    assert f"{start:.1f} us + {slope:.3f} us per MB, R² = {r2:.3f}" in part
    assert f"row-wise alone {line([r for r in every if 'group=row' in r['scheme']])[2]:.3f}" in part
    assert f"R² {r2:.3f}, {len(every)} products" in PAGE
    pairs = rows("h200-gemv-pairs")
    assert f"{len(pairs)} pairs there" in part
    assert f"R² = {line(pairs)[2]:.3f})" in part


def test_quality_over_bits_and_groups() -> None:
    part, cells = section("Figures 7, 10 and 11"), rows("bcq-quality-stories15M")
    grid = {(r["method"], r["group"], r["bits"]): r for r in cells if r["part"] == "grid"}
    assert len(grid) == 40
    for group in ("32", "64", "128", "256", "row"):
        bits = ", ".join(f"{grid['bcq', group, q]['bits_per_weight']:.2f}" for q in (2, 3, 4, 5))
        ratios = (", ".join(f"{grid[m, group, q]['ratio']:.3f}" for q in (2, 3, 4, 5)) for m in ("bcq", "hbcq"))
        assert f"| {group} | {bits} | {' | '.join(ratios)} |" in part
    best = front([r for r in grid.values() if r["method"] == "bcq"])
    grouped = [r for r in best if r["group"] != "row"]
    assert f"of the {len(best)} `bcq` cells" in part
    assert f", {len(grouped)} have groups, but groups of 32 only at 8.0 bits" in part
    assert [r["bits_per_weight"] for r in best if r["group"] == "32"] == [8.0]
    assert f"{len(grouped)} of stories15M's {len(best)} best" in PAGE


def test_quality_over_bits_and_groups_of_smollm2() -> None:
    part, cells = section("Figures 7, 10 and 11"), rows("h200-bcq-quality-smollm2")
    grid = {(r["method"], r["group"], r["bits"]): r for r in cells}
    assert len(grid) == len(cells) == 40
    for group in ("32", "64", "128", "256", "row"):
        found = [", ".join(f"{grid['bcq', group, q]['bits_per_weight']:.2f}" for q in (2, 3, 4, 5))]
        for method in ("bcq", "hbcq"):
            row = [grid[method, group, q] for q in (2, 3, 4, 5)]
            found.append("; ".join(f"{r['ratio']:.3f}" if r["ratio"] < 100 else f"{r['ratio']:,.0f}" for r in row))
            found.append(", ".join(f"{100 * r['lambada']['accuracy']:.1f}" for r in row))
        assert f"| {group} | {' | '.join(found)} |" in part
    best = front([r for r in cells if r["method"] == "bcq" and r["group"] != "32"])
    grouped = [r for r in best if r["group"] != "row"]
    assert f"{len(grouped)} of the {len(best)} best `bcq` cells have groups" in part
    assert f"{len(grouped)} of SmolLM2's {len(best)} |" in PAGE
    assert all(grid[m, "32", q]["ratio"] < 1.0005 for m in ("bcq", "hbcq") for q in (4, 5))
    assert all(r["ratio"] > 1000 and r["lambada"]["accuracy"] == 0 for r in best if r["bits"] == 2)
    fp32 = result("h200-bcq-quality-smollm2")["fp32"]["lambada"]
    assert f"full precision {100 * fp32['accuracy']:.1f} ± {100 * fp32['stderr']:.1f};" in part


def test_bits_by_kind_of_sub_layer() -> None:
    part, cells = section("Figure 13: bits by kind"), rows("bcq-quality-stories15M")
    splits = [r for r in cells if r["part"] == "sub-layers"]
    winners = []
    for method in ("bcq", "hbcq"):
        grid = [r for r in cells if r["part"] == "grid" and r["method"] == method]
        for r in (r for r in splits if r["method"] == method):
            if all(r["ratio"] < g["ratio"] for g in grid if g["bits_per_weight"] <= r["bits_per_weight"]):
                winners.append((method, r["attention"] - r["ffn"], r))
    assert {(method, more) for method, more, _ in winners} == {("bcq", 1), ("hbcq", 1)}
    mine = sorted((r["bits_per_weight"], r["ratio"]) for method, _, r in winners if method == "bcq")
    shown = [*(f"{bits:.2f}" for bits, _ in mine), *(f"{ratio:.3f}" for _, ratio in mine)]
    assert "at {}, {} and {} bits has ratios of {}, {} and {}".format(*shown) in part
    assert f"the other {len(splits) - len(winners)} splits do not" in part


def test_energy() -> None:
    table = section("Tables 3 and 4: GPT-3")
    found = {(*r["shape"], bits_of(r)): r for r in rows("h200-papers-energy")}
    assert len(found) == 12
    for n, k in dict.fromkeys((n, k) for n, k, _ in found):
        two = [found[n, k, bits] for bits in (2, 4)]
        speed = ", ".join(f"{r['speedup']:.2f}" for r in two)
        energy = ", ".join(f"{r['joules_per_call'] / r['baseline_joules_per_call']:.2f}" for r in two)
        watts = ", ".join(f"{r['watts']:.0f}" for r in two)
        assert f"| {speed} | {energy} | {watts} ({two[0]['baseline_watts']:.0f}) |" in table
    layer = [(36864, 12288), (12288, 12288), (49152, 12288), (12288, 49152)]

    def whole(bits: int, ours: str, theirs: str) -> float:
        return float(sum(found[n, k, bits][theirs] for n, k in layer) / sum(found[n, k, bits][ours] for n, k in layer))

    speed = [whole(bits, "microseconds", "baseline_microseconds") for bits in (2, 4)]
    energy = [1 / whole(bits, "joules_per_call", "baseline_joules_per_call") for bits in (2, 4)]
    assert "| {:.2f}, {:.2f} | {:.2f}, {:.2f} | |".format(*speed, *energy) in table
    assert f"short by {1 - speed[0] / 6.20:.0%} at 2 bits and {1 - speed[1] / 4.31:.0%} at 4" in table
    joules = {r["scheme"]: f"{r['joules_per_token']:.3f}" for r in rows("h200-decode-llama2-7b")}
    of = [joules[f"bcq:bits={bits},group=128"] for bits in (4, 3, 2)]
    assert "{}, {} and {} J at 4, 3 and 2 bits, fp16 {}".format(*of, joules["fp16"]) in table


def test_whole_steps() -> None:
    table = section("Tables 3, 6 and 7: whole models")
    found = {r["scheme"]: f"{r['milliseconds_per_token']:.2f}" for r in rows("h200-decode-llama2-7b")}
    (shown,) = (text for text in table.split("\n") if text.startswith("|") and "h200-decode-llama2-7b.json" in text)
    assert "| {} | {} | {} |".format(*(found[s] for s in ("fp16", *GROUPS_OF_128))) in shown
    groups = {(r["model"], r["scheme"]): r["milliseconds_per_token"] for r in rows("h200-papers-opt-groups")}
    for model in ("opt-30b", "opt-66b"):
        assert "| {:.2f} | {:.2f} |".format(*(groups[model, s] for s in GROUPS_OF_128)) in table
    before = {s: r["milliseconds_per_token"] for r in rows("h200-decode-opt-30b") for s in [r["scheme"]]}
    assert "OPT-30B {:.2f} and {:.2f}".format(*(before[s] for s in GROUPS_OF_128)) in table
    slower = groups["opt-30b", GROUPS_OF_128[1]] / before[GROUPS_OF_128[1]]
    assert f"and {slower:.2f} times as long at 3 bits" in table
    (fp16,) = (r for r in rows("h200-papers-opt") if (r["model"], r["scheme"]) == ("opt-30b", "fp16"))
    assert f"15.7 | {fp16['milliseconds_per_token']:.2f} |" in table
    fp16, row = (steps()["opt-66b", scheme] for scheme in ("fp16", "bcq:bits=3,group=row"))
    assert f"| {fp16['milliseconds_per_token']:.2f} |" in table
    times = fp16["milliseconds_per_token"] / row["milliseconds_per_token"]
    assert f"{row['milliseconds_per_token']:.2f} ms, {times:.2f} times fp16" in table


def test_llama_in_the_engine() -> None:
    table, ms = section("Tables 3, 6 and 7: whole models"), dict[str, list[float]]()
    for r in rows("h200-papers-llama"):
        ms.setdefault(r["model"].replace("llama2-", "llama-"), []).append(r["milliseconds_per_token"])
    for model, theirs in {"llama-13b": "9.3", "llama-30b": "18.1", "llama-65b": "31.3"}.items():
        shown = " | ".join(f"{time:.2f}" for time in ms[model])
        assert f"| LLaMA-{model[6:].upper()} | " in table
        assert f", {theirs} | {shown} |" in table
    assert f"LLaMA-30B at 3 bits {ms['llama-30b'][0] / ms['llama-30b'][2]:.2f} times" in table
    (before,) = (r for r in rows("h200-decode-llama-65b") if "bits=3" in r["scheme"])
    assert f"LLaMA-65B at 3 bits took {before['milliseconds_per_token']:.2f} ms" in table
    assert f"takes {ms['llama-65b'][2] / before['milliseconds_per_token']:.2f} and" in table


def test_opt_175b() -> None:
    part, found = section("Tables 4, 5 and 9: OPT-175B on one GPU"), steps()
    for bits in (1, 2, 3):
        r = found["opt-175b", f"bcq:bits={bits},group=row"]
        joules = "not measured" if r["joules_per_token"] is None else f"{r['joules_per_token']:.1f}"
        assert f"| {r['milliseconds_per_token']:.2f} | {r['weight_bytes'] / 1e9:.1f} | {joules} |" in part
    r = found["opt-175b", "bcq:bits=4,group=128"]
    assert f", group 128: {r['milliseconds_per_token']:.2f} | 88.3, {r['weight_bytes'] / 1e9:.1f} |" in part
    row, (old,) = found["opt-175b", "bcq:bits=3,group=row"], rows("h200-decode-opt-175b")
    assert f"**{row['milliseconds_per_token']:.1f} ms**, {row['weight_bytes'] / 1e9:.1f} GB" in PAGE
    assert f"its peak of {row['peak_memory_bytes'] / 1e9:.1f} GB" in part
    assert f"groups of 128 {old['milliseconds_per_token']:.1f} in an older path" in part
    ours, layer = products(), [(36864, 12288), (12288, 12288), (49152, 12288), (12288, 49152)]
    alone = 96 * sum(ours[n, k, 3, "row"]["microseconds"] for n, k in layer) / 1e3
    inside = row["breakdown"]["milliseconds"]["gemm"]
    assert f"{alone:.1f} ms one by one, {inside:.1f} inside the step" in part
    notes = (ROOT / "docs" / "notes" / "cuda-kernels.md").read_text(encoding="utf-8")
    assert f"at 3 bits reaches {row['share_of_ceiling']:.0%}" in notes
    groups = {r["scheme"]: r for r in rows("h200-papers-opt-groups") if r["model"] == "opt-175b"}
    two = [groups[f"bcq:bits=2,group={group}"] for group in (32, 64, 128)]
    times, sizes = (", ".join(f) for f in zip(*map(time_and_size, two), strict=True))
    assert f"| {times} | {sizes} | not measured |" in part
    assert "| {} | {} | not measured |".format(*time_and_size(groups["bcq:bits=3,group=128"])) in part
    assert "| {}, group 128: ".format(time_and_size(groups["bcq:bits=4,group=row"])[0]) in part
    shares = [(r["breakdown"]["milliseconds"], r["breakdown"]["profiled_ms"]) for r in found.values()]
    gemm = [100 * ms["gemm"] / whole for ms, whole in shares]
    rest = [100 * (ms["rest"] + ms["attention"]) / whole for ms, whole in shares]  # of older rows: attention's too
    part = section("Figure 5: where a step's time goes")
    assert f"{min(gemm):.1f} to {max(gemm):.1f}%" in part
    assert f"at most {max(rest):.1f}%" in part


def test_the_look_up_kernel_in_the_notes() -> None:
    notes = (ROOT / "docs" / "notes" / "cuda-kernels.md").read_text(encoding="utf-8")
    found = {(*r["shape"], bits_of(r), r["variant"]): r for r in rows("h200-papers-look-up")}
    assert len(found) == 27
    for n, k in dict.fromkeys((n, k) for n, k, _, _ in found):
        each = (
            ", ".join(f"{found[n, k, bits, variant]['microseconds']:.1f}" for bits in (2, 3, 4))
            for variant in ("bit-serial", "private", "shared")
        )
        fp16 = found[n, k, 2, "shared"]["baseline_microseconds"]
        assert f"| {n} × {k} | {fp16:.1f} | {' | '.join(each)} |" in notes


def test_asynchronous_dequantization() -> None:
    part, found = section("Figures 8 and 9: the product"), rows("h200-papers-dataflow")
    mine = {(*r["shape"], r["outliers"]): r for r in found}
    for n, k in dict.fromkeys((n, k) for n, k, _ in mine):
        three = [mine[n, k, share] for share in (0, 0.002, 0.01)]
        figures = ("speedup", "asynchronous_over_synchronous", "asynchronous_over_pipelined")
        assert f"| {n} × {k} | {' | '.join(', '.join(f'{r[f]:.2f}' for r in three) for f in figures)} |" in part
    for r in found:  # over another dataflow: its time over that of the asynchronous one
        us = {way: r[way]["microseconds"] for way in ("default", "synchronous", "pipelined", "asynchronous")}
        assert r["asynchronous_over_synchronous"] == pytest.approx(us["synchronous"] / us["asynchronous"])
        assert min(us, key=lambda way: us[way]) == "default"
    large = [r["asynchronous_over_synchronous"] for r in found if r["shape"] != [4096, 4096]]
    ahead = [r["asynchronous_over_pipelined"] for r in found]
    assert (
        f"{min(large):.2f} to {max(large):.2f} times; **not** than loading ahead: {min(ahead):.2f} to {max(ahead):.2f}"
        in PAGE
    )
    small = {r["outliers"]: r["asynchronous_over_synchronous"] for r in found if r["shape"] == [4096, 4096]}
    assert max(small.values()) < 1
    assert f"({small[0.015]:.2f} at 1.5%)" in part
    assert f"up to {1 / min(ahead) - 1:.0%} longer" in part
    for share, name in ((0.002, "0.2%"), (0.01, "1%")):
        cost = [
            mine[n, k, share]["default"]["microseconds"] / r["default"]["microseconds"]
            for (n, k, o), r in mine.items()
            if o == 0
        ]
        assert (
            f"{name}{' outliers cost' if share == 0.002 else ''} {100 * min(cost) - 100:.0f} to {max(cost) - 1:.0%}"
            in part
        )
    notes = (ROOT / "docs" / "notes" / "cuda-mixed-integer.md").read_text(encoding="utf-8")
    assert f"{min(large):.2f} to {max(large):.2f} times as fast" in notes
    assert f"{min(small.values()):.2f} to {max(small.values()):.2f} at 4096" in notes


def test_mixed() -> None:
    fp16, ours = rows("h200-mixed-llama2-7b")
    table = section("Table 3: whole steps and their cost")
    cost = fp16["cost"]["total"] / ours["cost"]["total"]
    assert f"| {ours['tokens_per_second']:.1f} | {ours['speedup']:.2f} | {ours['speedup']:.2f}, {cost:.2f} |" in table
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
            assert f"| {best:.1f} ({min(row['cublas']) / best:.2f}) |" in table, row
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
    for row in rows("h200-trace-atom") + rows("h200-trace-rounds"):
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


def test_the_earlier_run_and_w4a16() -> None:
    pairs = sorted((r for r in rows("h200-gemv-pairs") if "group=row" in r["scheme"]), key=lambda r: str(r["scheme"]))
    assert "has {:.2f}, {:.2f} and {:.2f} there".format(*(r["speedup"] for r in pairs)) in section("Table 2: products")
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
    before = ""
    for a, b in zip(rows("h200-atom-ablation-smollm2")[1:], rows("atom-ablation-stories15M")[1:], strict=True):
        bits = f"{a['bits_per_weight']:.2f}, {b['bits_per_weight']:.2f}"
        assert f"| {a['ratio']:.3f} | {b['ratio']:.3f} | {'″' if bits == before else bits} |" in table, a["name"]
        before = bits
    found = {r["name"]: r["perplexity"] for r in rows("h200-zero-shot-smollm2")}
    part = section("Tables 3, 6 and 7: whole models")
    assert all(f"{found[name]:.2f}" in part for name in ("fp16", "rtn3", "auto3", "auto3-full"))


def test_quality_of_mixed_matrices() -> None:
    table, tasks = section("Tables 1 and 2: quality"), {r["name"]: r for r in rows("h200-zero-shot-smollm2")}
    fp16, mixed = tasks["fp16"]["perplexity"], tasks["mixed-four25"]
    assert f"{mixed['perplexity']:.2f}, full precision {fp16:.2f} ({mixed['perplexity'] / fp16:.2f})" in table
    assert f"four tasks {paired(mixed)}" in table
    trained = next(r for r in rows("h200-mixed-quality-smollm2") if r.get("commit") and "tune=full" in r["scheme"])
    assert f"{trained['test']:.2f} ({trained['test_ratio']:.2f}) after {trained['seconds']:.0f} s" in table
    fp32, small = rows("cpu-stsb")[:2]
    assert f"at {small['bits_per_weight']:.3f} bits: {small['spearman']:.4f}, fp32 {fp32['spearman']:.4f}" in table
    table, (whole, part) = section("Table 3: whole steps"), rows("h200-mixed-llama2-7b")
    assert f"| {whole['tokens_per_second']:.1f} | 1 | 1, 1 |" in table
    joules = whole["joules_per_token"], part["joules_per_token"]
    assert "falls {:.1f} times ({:.3f} to {:.3f} J a token)".format(joules[0] / joules[1], *joules) in table
    assert f"reaches {whole['share_of_ceiling']:.0%} of a plain read" in table
    bcq = {r["scheme"]: r for r in rows("h200-decode-llama2-7b")}["bcq:bits=3,group=128"]["milliseconds_per_token"]
    assert f"takes {bcq:.2f} ms where this takes {part['milliseconds_per_token']:.2f}" in table
    pairs, names = rows("h200-papers-mixed"), ("Llama-2-7B", "Llama-3-8B", "Llama-2-13B", "Llama-2-70B")
    for name, fp16, ours in zip(names, pairs[::2], pairs[1::2], strict=True):
        assert fp16["model"] == ours["model"] == name.lower().replace("-", "", 1)
        ms, watts, joules = ([r[key] for r in (fp16, ours)] for key in ("milliseconds_per_token", "watts", JOULES))
        speeds = f"{ms[0]:.2f} | {ms[1]:.2f} | {ms[0] / ms[1]:.2f}"
        power = f"{watts[0]:.0f}, {watts[1]:.0f} | {joules[0]:.2f}, {joules[1]:.2f}"
        assert f"| {name} | {speeds} | {power} |" in table
    table = section("Table 4: 4-bit groups")
    named = {r["name"]: r for r in rows("h200-mixed-ablation-smollm2")}
    assert f"the Hessian alone ({named['four=0.25 hessian']['ratio']:.2f})" in table
    bits = [
        named[f"four={share} {way}"]["bits_per_weight"]
        for way in ("sensitivity", "inter-layer")
        for share in (0.25, 0.1)
    ]
    assert "{:.2f} at 25%, {:.2f} at 10% (SmolLM2; whole layers {:.2f} and {:.2f})".format(*bits) in table
    bits = [named[f"outliers={share} 2-bit groups"]["bits_per_weight"] for share in (0.002, 0.005)]
    assert "{:.2f} and {:.2f} with 0.2% and 0.5% outliers".format(*bits) in table


def paired(row: dict[str, Any]) -> str:
    """Return the mean difference of the tasks from fp16 and its error, in points."""
    each = [t["against"]["paired"] for t in row["tasks"].values()]
    mean = 100 * sum(t["difference"] for t in each) / len(each)
    error = 100 * sum(t["stderr"] ** 2 for t in each) ** 0.5 / len(each)
    return f"{mean:.1f} ± {error:.1f}".replace("-", "−")


def test_engine_and_search() -> None:
    ms = {r["scheme"]: r["milliseconds_per_token"] for r in rows("h200-engine-llama2-7b")}
    three = [ms[scheme] for scheme in ("fp16", "rtn:bits=4,group=128", "bcq:bits=3,group=128")]
    part = section("Tables 3, 6 and 7: whole models")
    assert "takes {:.2f}, {:.2f} (uniform) and {:.2f} ms".format(*three) in part
    found = {r["scheme"]: r for r in rows("h200-decode-llama2-7b")}
    times = [found[f"bcq:bits={bits},group=128"]["speedup"] for bits in (4, 3, 2)]
    assert "ours {:.2f} and {:.2f}, and {:.2f} at 2 bits".format(*times) in part
    plan, one = rows("search-smollm2")[:2]
    part = section("Figure 13: bits by kind")
    assert f"{plan['test_ratio']:.3f} times fp32 against {one['test_ratio']:.3f}" in part
    assert f"on unseen text {plan['unseen_ratio']:.3f} and {one['unseen_ratio']:.3f}" in part


def test_perplexity_and_tasks_of_atom() -> None:
    text = section("Tables 1 to 3: quality")
    found = {(r["name"], r["kv"], r["text"].split("-")[0]): r for r in rows("h200-atom-quality-smollm2")}
    ours, fp32 = found["w4a4kv4", "4", "wikitext2"], found["fp", "16", "wikitext2"]
    assert f"{ours['perplexity']:.2f}, fp32 {fp32['perplexity']:.2f} ({ours['ratio']:.3f})" in text
    assert f"{ours['bits_per_weight']:.2f} bits per weight" in text
    trained = (
        rows("h200-atom-ablation-smollm2")[-1]["ratio"],
        found["w4a4kv4-short256-rows512", "4", "wikitext2"]["ratio"],
    )
    assert "trained {:.3f} to {:.3f}".format(*trained) in text
    small = found["w3a3", "16", "wikitext2"]
    assert f"ours {small['bits_per_weight']:.2f} bits" in text
    assert f"{small['perplexity']:.2f} ({small['ratio']:.3f})" in text
    unseen = (found[name, "4", "tinystories"]["ratio"] for name in ("w4a4kv4", "w4a4kv4-short128"))
    assert "unseen: {:.3f}, trained {:.3f}".format(*unseen) in text
    tasks = {r["name"]: r for r in rows("h200-zero-shot-smollm2")}

    def mean(name: str) -> float:
        each = [Fraction(str(t["accuracy"])) for t in tasks[name]["tasks"].values()]
        return float(sum(each) * 100 / len(each)) + 1e-9  # exact, and half a digit is rounded up

    points = mean("atom-w4a4kv4"), mean("fp16")
    assert "{:.1f}, full precision {:.1f} ({})".format(*points, paired(tasks["atom-w4a4kv4"])) in text


def test_peers_and_ratios_of_atom() -> None:
    table = section("Figure 10: products and attention")
    few, found = [], [r for r in rows("h200-integer-gemm") if r["scheme"] == "atom-w4a4"]
    for row in found:
        fp16 = min(row["cublas"])
        if row["rows"] == 512:
            int8, fp8 = min(row["int_mm"]), min(row["fp8"])
            assert f"| {'{} × {}'.format(*row['shape'])} | {fp16:.1f} | {min(row['microseconds']):.1f} (" in table
            assert f"| {int8:.1f} | {fp8:.1f} |" in table
        elif row["rows"] == 16:
            few.append(fp16 / min(row["microseconds"]))
    assert f"{min(few):.2f} to {max(few):.2f} times as fast as fp16" in table
    batch = {
        r["cache"]: r for r in rows("h200-attention") if (r["batch"], r["context"], r["kv_heads"]) == (128, 1024, 32)
    }
    us = (batch[kv]["us"] for kv in ("kv16", "kv8", "kv4"))
    assert "{:.1f}, {:.1f} and {:.1f} us".format(*us) in table
    assert f"at {batch['kv4']['tb_per_s']:.2f} TB/s, 16-bit ones at {batch['kv16']['tb_per_s']:.2f}" in table
    table = section("Figure 11: throughput and latency")
    (long,) = (r for r in rows("h200-serve-atom-hadamard") if r["batch"] == 256)
    assert f"of 256 sequences takes {long['milliseconds_per_step']:.1f} ms" in table
    trace = {(r["scheme"], str(r["kv"])): r["tokens_per_second"] for r in rows("h200-trace-atom")}
    w4a4, fp16, w8a8 = (trace[of] for of in (("atom:w=4,a=4", "kv4"), ("fp16", "kv16"), ("atom:w=8,a=8", "kv8")))
    assert f"{w4a4 / fp16:.2f} times fp16, {w4a4 / w8a8:.2f} times W8A8" in table
    rounds = {r["scheme"]: r["tokens_per_second"] for r in rows("h200-trace-rounds")}
    w4a4, w4a16, w8a8 = (rounds[of] for of in ("atom:w=4,a=4", "rtn:bits=4,group=128", "atom:w=8,a=8"))
    assert f"{w4a4 / w4a16:.2f} times W4A16, {w4a4 / w8a8:.2f} times W8A8" in table

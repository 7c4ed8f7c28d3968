"""Perplexity of SmolLM2 with integer weights and activations (`atom`) and small caches, as ratios to fp32.

    python bench/quality/atom_quality.py OUT.json DATA [--only w4a4,fp] [--device cuda] [--jobs 5]   DATA has text/

Calibration sees WikiText-2 valid; tests are WikiText-2 test (windows of 1024, 10,240 tokens) and TinyStories, which no
calibration sees (18,432 tokens). A row is one evaluation; it is added to OUT.json with the commands that made it when
it is done, and what OUT.json has already is not run again. Cases are run in the order of CASES.
"""

import argparse
import tempfile
from pathlib import Path

from quality import Results, Row, chosen, crelle, run_cases, shared

TEXTS = {"w": ("wikitext2-test.txt", 10240), "t": ("tinystories-test.txt", 20480)}
BOTH = "16:w 4:w 16:t 4:t"
SMALLER = "k4v2,layers.0=4:w k4v2,layers.0-3=4:w k4v2:group=16:w"
CASES: dict[str, tuple[str, int, str, tuple[str, ...]]] = {  # scheme, calibration rows, CACHE:TEXT …, more options
    "fp": ("", 0, f"16:w 16:t k4v2:w 4:w 3:w {SMALLER}", ()),
    "w4a4kv4-short1024-rows512": ("atom:w=4,a=4,kv=4,tune=short,steps=1024", 512, BOTH, ()),
    "w4a4kv4-short128": ("atom:w=4,a=4,kv=4,tune=short,steps=128", 128, "4:w 4:t 16:w", ()),
    "w4a4kv4-short256-rows512": ("atom:w=4,a=4,kv=4,tune=short,steps=256", 512, "4:w 4:t", ()),
    "w4a4kv4": ("atom:w=4,a=4,kv=4", 128, "4:w 4:t", ()),
    "w4a4kv4-rows512": ("atom:w=4,a=4,kv=4", 512, "4:w 4:t", ()),
    "w4a4kv4-full": ("atom:w=4,a=4,kv=4,tune=full,steps=128,end=800,own=512", 256, BOTH, ()),
    "w4a4-fp16-outliers": ("atom:w=4,a=4,outlier_bits=16", 128, "16:w 16:t", ()),
    "w4a4-no-folds": ("atom:w=4,a=4,folds=false", 128, "16:w 16:t", ()),
    "w4a4": ("atom:w=4,a=4", 128, BOTH, ()),
    "w4a4-rows512": ("atom:w=4,a=4", 512, BOTH, ()),
    "w4a4-no-hadamard": ("atom:w=4,a=4,hadamard=false", 128, BOTH, ()),
    "w4a4-no-hadamard-rows512": ("atom:w=4,a=4,hadamard=false", 512, BOTH, ()),
    "w4a4kv4-own256-short512": ("atom:w=4,a=4,kv=4,tune=short,steps=512", 256, BOTH, ("--own", "256")),
    "w4a8kv4": ("atom:w=4,a=8,kv=4", 128, "4:w 4:t", ()),
    "w4a8kv4-levels2": ("atom:w=4,a=8,kv=4,levels=2", 128, "4:w 4:t", ()),
    "w4a16": ("atom:w=4,a=16", 128, "16:w 16:t", ()),
    "w3a3": ("atom:w=3,a=3", 128, "16:w", ()),
}


class Ratios(Results):
    def complete(self) -> None:
        full = {r["text"]: r["perplexity"] for r in self.rows if (r["name"], r["kv"]) == ("fp", "16")}
        for r in self.rows:
            if r["text"] in full:
                r["ratio"] = r["perplexity"] / full[r["text"]]


def run(name: str, source: Path, args: argparse.Namespace, results: Ratios) -> None:
    scheme, rows, evaluations, more = CASES[name]
    texts = args.data / "text"
    todo = [e.rpartition(":")[::2] for e in evaluations.split()]
    todo = [(kv, *TEXTS[t]) for kv, t in todo if not results.has(name=name, kv=kv, text=TEXTS[t][0])]
    if not todo:
        return
    with tempfile.TemporaryDirectory() as d:
        made, facts, commands = source, Row(), list[str]()
        if scheme:
            made = Path(d) / "out"
            options = ("--scheme", scheme, "--rows", rows, "--length", 512, *more)
            calib = "wikitext2-valid-tokenised.txt"
            report = crelle(
                "quantize", source, made, "--head", "none", *options, "--calib", texts / calib, *shared(args)
            )
            facts = {k: report[k] for k in ("scheme", "bits_per_weight", "seconds")} | {"rows": rows}
            commands.append(f"crelle quantize SMOLLM2 OUT {' '.join(map(str, options))} --calib {calib}")
        for kv, file, tokens in todo:
            sizes = ("--context", 1024, "--tokens", tokens, "--kv", kv)
            found = crelle("eval", made, "--text", texts / file, *sizes, *shared(args))
            told = f"crelle eval {'OUT' if scheme else 'SMOLLM2'} --text {file} {' '.join(map(str, sizes))}"
            row = {"name": name, "kv": kv, "text": file, **{k: found[k] for k in ("perplexity", "tokens")}}
            row |= {**facts, "commands": [*commands, told]}
            results.add(row, "name", "kv", "text", "perplexity", "ratio")


def main() -> None:
    from crelle.eval.smollm2 import smollm2

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--model", type=Path, help="SmolLM2's GGUF file; default: the one that the demo keeps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time, which share the cores")
    args = parser.parse_args()
    names, source = chosen(args.only, CASES), args.model or smollm2()
    results = Ratios(args.out, "python bench/quality/atom_quality.py OUT.json DATA")
    run_cases(names, lambda name: run(name, source, args, results), args.jobs)


if __name__ == "__main__":
    main()

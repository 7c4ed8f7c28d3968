"""Which groups deserve 4 bits, and where outliers come from: the ablation of the 2/4/16-bit paper (Table 4), in kind.

    python bench/quality/mixed_ablation.py stories15M|smollm2 OUT.json DATA [--only inter,random] [--tokens N]
                                   [--device cuda] [--jobs 8]

At the same share of 4-bit groups, hence at equal bits: chosen within each matrix by sensitivity, range, the Hessian's
diagonal alone or at random; or whole layers (all matrices of every fourth, or tenth, layer). And outliers: from 2-bit
groups only, or from all. Nothing is trained. Two runs of error feedback that differ in the least thing end at other
perplexities, so each is made --repeat times, with other values of `damp`; what counts is the mean. Rows are added to
OUT.json as they are done, so a run can be stopped and gone on with; OUT.png is drawn at the end.
"""

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quality import CASES, add_options, calibration, crelle, layer_bits, shared

SHARES = {0.10: "about 2.6 bits", 0.25: "about 2.85 bits"}
RANKS = ("sensitivity", "range", "hessian", "random")
DAMPS = (0.2, 0.17, 0.24, 0.15, 0.27, 0.185, 0.22)  # of the repetitions


def cases(layers: int) -> dict[str, tuple[str, dict[str, str]]]:
    """Return scheme and overrides by name."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for share in SHARES:
        for rank in RANKS:
            found[f"four={share} {rank}"] = f"mixed:group=16,four={share},outliers=0,rank={rank}", {}
        whole = round(share * layers)
        chosen = [round((i + 0.5) * layers / whole) for i in range(whole)] if whole else []
        fine = {f"*layers.{i}.*": "mixed:group=16,four=1,outliers=0" for i in chosen}
        found[f"four={share} inter-layer"] = "mixed:group=16,four=0,outliers=0", fine
    for outliers in (0.002, 0.005):
        for exclusive in ("true", "false"):
            scheme = f"mixed:group=16,four=0.25,outliers={outliers},exclusive={exclusive}"
            found[f"outliers={outliers} {'2-bit groups' if exclusive == 'true' else 'all groups'}"] = scheme, {}
    return found


def draw(path: Path, result: dict[str, Any]) -> None:
    from crelle.plots import plot_runs

    rows = sorted(result["rows"], key=lambda row: (row["bits_per_weight"], row["ratio"]))
    plot_runs(
        path,
        {
            f"{row['name']} ({row['bits_per_weight']:.2f} bits)": [p / result["fp32"] for p in row["perplexities"]]
            for row in rows
        },
        f"{result['model']}: 4-bit groups and outliers",
        "perplexity, times that of fp32 (less is better); dots: runs, line: their mean",
    )


def main() -> None:
    from crelle.bench.environment import environment
    from crelle.eval.smollm2 import smollm2
    from crelle.formats.storage.io import write_whole
    from crelle.formats.storage.open import open_weights
    from crelle.models.loader import read_spec

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(CASES))
    parser.add_argument("out", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", default="", help="parts of the names of rows to make, with commas")
    parser.add_argument("--tokens", type=int, help="of the test text; default: as bench/quality/quality.py")
    parser.add_argument("--repeat", type=int, default=3, choices=range(1, len(DAMPS) + 1), metavar="N")
    add_options(parser)
    args = parser.parse_args()
    case = CASES[args.model]
    source = smollm2() if args.model == "smollm2" else args.data / "stories15M"
    file, context, tokens = case["test"]
    tokens, rows, length = args.tokens or tokens, args.rows or case["rows"], args.length or case["length"]
    command = f"python bench/quality/mixed_ablation.py {args.model} OUT.json DATA --tokens {tokens} --rows {rows}"
    command += f" --length {length} --repeat {args.repeat} --device {args.device} --jobs {args.jobs}"
    result = {"rows": [], "model": args.model}
    if args.out.exists():
        result = json.loads(args.out.read_text())
        if result["command"] != command:
            raise SystemExit(f"{args.out} was made by another command: {result['command']}")
    result = {**environment(), "command": command, **result}

    def perplexity(directory: Path) -> float:
        options = ("--text", args.data / "text" / file, "--context", context, "--tokens", tokens)
        return float(crelle("eval", directory, *options, *shared(args))["perplexity"])

    def run(scheme: str, overrides: dict[str, str], damp: float) -> tuple[float, float, float]:
        """Return perplexity, bits per weight and seconds."""
        with tempfile.TemporaryDirectory() as d:
            made = Path(d) / "out"
            others = [("--override", f"{pattern}={other},damp={damp}") for pattern, other in overrides.items()]
            options = [part for pair in others for part in pair]
            scheme = f"{scheme},damp={damp}"
            report = crelle(
                "quantize", source, made, "--scheme", scheme, *options, *calibration(args, case), *shared(args)
            )
            return perplexity(made), layer_bits(made), report["seconds"]

    if "fp32" not in result:
        result["fp32"] = perplexity(source)
    done = {row["name"] for row in result["rows"]}
    wanted = [part for part in args.only.split(",") if part]
    todo = {
        name: case
        for name, case in cases(len(read_spec(open_weights(source)).layers)).items()
        if name not in done and (not wanted or any(part in name for part in wanted))
    }
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = {name: [pool.submit(run, *case, damp) for damp in DAMPS[: args.repeat]] for name, case in todo.items()}
        for name, (scheme, overrides) in todo.items():
            found = [one.result() for one in runs[name]]
            perplexities = [one[0] for one in found]
            mean = sum(perplexities) / len(found)
            row = {"name": name, "scheme": scheme, "overrides": overrides, "seconds": sum(one[2] for one in found)}
            row |= {"perplexities": perplexities, "bits_per_weight": found[0][1], "perplexity": mean}
            row["ratio"] = mean / result["fp32"]
            result["rows"].append(row)
            write_whole(args.out, (json.dumps(result, indent=2) + "\n").encode())
            print({k: v for k, v in row.items() if k != "overrides"}, flush=True)
    draw(args.out.with_suffix(".png"), result)


if __name__ == "__main__":
    main()

"""What end-loss guidance brings: perplexity of each quantizer with and without it, on the test text and an unseen one.

    python bench/quality/guidance.py OUT.json DATA [--model smollm2] [--guidance 0,0.5] [--only 'gptq.*']
                                     [--tokens 8192] [--rows 32] [--length 512] [--device cuda]

DATA: a folder with text/ (and stories15M/). Texts, windows and their default lengths are those of
bench/quality/quality.py. All cases calibrate on the same rows, and the pass over them that gives the tokens' weights is
shared by the cases, which changes no result. Rows are added to OUT.json as they are done.
"""

import argparse
import re
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from quality import CASES, Results, add_options, layer_bits

from crelle.engine.llm import LLM
from crelle.eval.perplexity import perplexity
from crelle.eval.smollm2 import smollm2
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.run import quantize
from crelle.quantizers import pipeline
from crelle.quantizers.calibration.guidance import Guidance

GROUP = {"smollm2": 64, "stories15M": 96}
LARGE = {"smollm2": 128, "stories15M": 288}  # groups of planes, each of which has a scale of its own


def schemes(model: str) -> list[str]:
    """Return the schemes at 2, 3 and 4 bits."""
    g, large = GROUP[model], LARGE[model]
    each = [f"gptq:bits={b},group={g}" for b in (3, 2, 4)] + [f"hbcq:bits={b},group={large}" for b in (2, 3, 4)]
    each += [f"awq:bits={b},group={g}" for b in (2, 3, 4)] + [f"bcq-nested:bits=4,group={large}"]
    each += [f"mixed:four={share},group=16" for share in (0.0, 0.5, 1.0)]
    each += [f"atom:w={b},a=8,group={g},outliers=32" for b in (3, 4)]
    each += [f"trellis:bits={b}" for b in (2, 3, 4)]
    return each + [f"auto:bits={bits},steps=8" for bits in (2.35, 3.35, 4.35)]


def perplexities(model: Path, name: str, data: Path, tokens: int | None, device: str) -> dict[str, float]:
    llm, found = LLM.load(model, device=device), {}
    for text in ("test", "unseen"):
        file, context, most = CASES[name][text]
        content = (data / "text" / file).read_text()
        found[text] = perplexity(llm, content, context=context, tokens=min(most, tokens or most)).perplexity
    return found


def share_guidance() -> None:
    """Compute the tokens' weights once for all cases: they depend on the model and on the rows alone."""
    guide = pipeline.guide
    known: list[Guidance] = []

    def shared(*args: Any, **options: Any) -> Guidance:
        if not known:
            known.append(guide(*args, **options))
        return known[0]

    pipeline.guide = shared


def one(scheme: str, name: str, source: Path, data: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Quantize and evaluate one case."""
    of = CASES[name]
    calibration = CalibrationData(
        text=(data / "text" / of["calib"]).read_text(), rows=args.rows, length=args.length or of["length"]
    )
    begun = perf_counter()
    with tempfile.TemporaryDirectory() as d:
        made = quantize(source, Path(d) / "out", scheme, text=calibration, device=args.device)
        row = {"bits_per_weight": layer_bits(made.out), "seconds": perf_counter() - begun}
        return row | perplexities(made.out, name, data, args.tokens, args.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="smollm2", choices=CASES)
    parser.add_argument("--guidance", default="0,0.5", help="exponents, with commas")
    parser.add_argument("--only", default="", help="a regular expression for what to run")
    parser.add_argument("--tokens", type=int, help="of each text; default: by model")
    add_options(parser)
    parser.set_defaults(rows=32)
    args = parser.parse_args()
    source = smollm2() if args.model == "smollm2" else args.data / args.model
    given = [f"--model {args.model} --guidance {args.guidance} --rows {args.rows}"]
    given += [f"--{name} {value}" for name in ("tokens", "length") if (value := getattr(args, name))]
    results = Results(args.out, f"python bench/quality/guidance.py OUT.json DATA {' '.join(given)}")
    results.result["model"] = args.model
    if "fp32" not in results.result:
        results.result["fp32"] = perplexities(source, args.model, args.data, args.tokens, args.device)
    share_guidance()
    for scheme in schemes(args.model):
        for strength in args.guidance.split(","):
            named = f"{scheme},guidance={strength}" if float(strength) else scheme
            case = {"scheme": named, "guidance": float(strength)}
            if results.has(**case) or not re.search(args.only, f"{scheme} guidance {strength}"):
                continue
            row = case | one(named, args.model, source, args.data, args)
            row |= {f"{k}_ratio": row[k] / value for k, value in results.result["fp32"].items()}
            results.add(row, "scheme", "guidance", "bits_per_weight", "test_ratio", "unseen_ratio", "seconds")


if __name__ == "__main__":
    main()

"""What rotating inputs and outputs gains a scalar grid: GPTQ behind Hadamard rotations, at equal bits.

    python bench/rotated_grids.py smollm2|stories15M OUT.json DATA [--only 'bits=2'] [--rows 64] [--jobs 6]

A weight W becomes U W Rᵀ, with R and U products of Hadamard matrices and random signs, its inputs' Hessian R H Rᵀ; it
is fitted on a grid as ever and rotated back, and the model that is evaluated is not quantized otherwise, so that no
kernel is needed. That is the rotation of QuIP# and EXL3 with a uniform grid in place of their codebooks. Rows are added
to OUT.json as they are done.
"""

import argparse
import dataclasses
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from quality import CASES, Results, add_options
from torch import Tensor

from crelle.eval.smollm2 import smollm2
from crelle.formats.base import format_of
from crelle.formats.dense import DenseTensor
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.run import quantize
from crelle.quantizers.calibration.stats import Stats
from crelle.quantizers.schemes.gptq import GPTQ

_FIT = GPTQ.fit


def cases() -> dict[str, tuple[str, int | None, bool]]:
    """Return scheme, channels of a block that is rotated (0: none, None: all inputs) and whether outputs are too."""
    found: dict[str, tuple[str, int | None, bool]] = {}
    for bits in (2, 3, 4):
        for group in ("64", "row", "128"):
            scheme = f"gptq:bits={bits},group={group}" + (",free=true" if bits == 2 else "")
            found[f"{scheme} plain"] = scheme, 0, False
            found[f"{scheme} inputs"] = scheme, None, False
            found[f"{scheme} inputs outputs"] = scheme, None, True
            if group == "64":
                found[f"{scheme} inputs by 64"] = scheme, 64, False
    return found


def rotation(width: int, block: int | None, device: torch.device, seed: int) -> Tensor:
    """Return an orthogonal matrix: random signs, then Hadamard of blocks, or of all with a random odd factor."""
    power = min(width & -width, block or width)
    rest = width // power
    chance = torch.Generator().manual_seed(seed)
    hadamard = torch.ones(1, 1)
    while len(hadamard) < power:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard)
    between = torch.eye(rest) if block else torch.linalg.qr(torch.randn(rest, rest, generator=chance))[0].contiguous()
    signs = torch.randint(0, 2, (width,), generator=chance).float() * 2 - 1
    return (torch.kron(between, hadamard / power**0.5) * signs).to(device)


def rotated_fit(config: GPTQ, weight: Tensor, stats: Stats | None, block: int | None, outputs: bool) -> DenseTensor:
    """Fit a grid to the rotated weight and return what it stands for, rotated back."""
    assert stats is not None
    N, K = weight.shape
    if block == 0:
        return DenseTensor(_FIT(config, weight, stats).dequantize(torch.float32))
    R = rotation(K, block, weight.device, seed=K)
    U = rotation(N, None, weight.device, seed=N + 1) if outputs else None
    if "rotated" not in stats.kept:
        cross = None if stats.cross is None else R @ stats.cross @ R.T
        stats.kept["rotated"] = dataclasses.replace(stats, hessian=R @ stats.hessian @ R.T, cross=cross, kept={})
    turned = weight.float() @ R.T
    fitted = _FIT(config, turned if U is None else U @ turned, stats.kept["rotated"]).dequantize(torch.float32)
    return DenseTensor((fitted if U is None else U.T @ fitted) @ R)


def one(model: str, name: str, data: Path, rows: int, length: int, tokens: int, device: str) -> dict[str, Any]:
    """Quantize and evaluate one case."""
    from crelle.engine.llm import LLM
    from crelle.eval.perplexity import perplexity

    scheme, block, outputs = cases()[name]
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    case, spent = CASES[model], [0, 0]  # bits and weights
    source = smollm2() if model == "smollm2" else data / "stories15M"

    def fit(self: GPTQ, weight: Tensor, stats: Stats | None = None) -> DenseTensor:
        spec = self.storage((weight.shape[0], weight.shape[1]))
        spent[0] += weight.shape[0] * format_of(spec).row_bits(spec)
        spent[1] += weight.numel()
        return rotated_fit(self, weight, stats, block, outputs)

    text = CalibrationData(text=(data / "text" / case["calib"]).read_text(), rows=rows, length=length)
    with tempfile.TemporaryDirectory() as d, mock.patch.object(GPTQ, "fit", fit):
        report = quantize(source, Path(d) / "out", scheme, text=text, device=device)
        file, context, _ = case["test"]
        words, llm = (data / "text" / file).read_text(), LLM.load(Path(d) / "out", device=device)
        found = perplexity(llm, words, context=context, tokens=tokens).perplexity
    return {"name": name, "bits_per_weight": spent[0] / spent[1], "seconds": report.seconds, "test": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=list(CASES))
    parser.add_argument("out", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", default="", help="a part of the names of rows to make")
    parser.add_argument("--tokens", type=int, default=10240, help="of the test text")
    add_options(parser)
    args = parser.parse_args()
    case = CASES[args.model]
    rows, length = args.rows or case["rows"], args.length or case["length"]
    command = f"python bench/rotated_grids.py {args.model} OUT.json DATA --rows {rows} --length {length}"
    command += f" --tokens {args.tokens} --device {args.device} --jobs {args.jobs}"
    results = Results(args.out, command)
    names = [n for n in cases() if args.only in n and not results.has(name=n)]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        running = {
            pool.submit(one, args.model, name, args.data, rows, length, args.tokens, args.device): name
            for name in names
        }
        for done in as_completed(running):
            if error := done.exception():
                print(running[done], error, flush=True)
            else:
                results.add(done.result() | {"model": args.model}, "name", "bits_per_weight", "test")


if __name__ == "__main__":
    main()

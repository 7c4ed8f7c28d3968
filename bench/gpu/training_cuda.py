"""End-to-end training of a model of a real shape in little memory: time and memory of a step, by number of layers.

    python bench/gpu/training_cuda.py OUT.json [--shape llama3-8b] [--layers 2] [--batch 8] [--length 2048] [--steps 4]

Random weights; the student has affine grids of 2 bits. Both models, all layers asked for, are trained together as
`tune=full` trains them where memory is short (crelle.quantizers.training.end_to_end); the difference between two
numbers of layers is the cost of a layer, from which the whole model is extrapolated (`whole`, said so). On the way the
loss must be finite and the parameters must move.
"""

import argparse
import gc
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from crelle.bench.environment import environment
from crelle.bench.model_shapes import SHAPES, RandomWeights
from crelle.models.calibration_model import open_model
from crelle.quantizers.calibration.layer_api import Block
from crelle.quantizers.training.blockwise import Training
from crelle.quantizers.training.end_to_end import EndToEnd, Network, drawn
from crelle.quantizers.training.ste import trainable
from crelle.quantizers.training.ste_base import TrainableWeight
from crelle.quantizers.training.teacher import Teacher

SCHEME = "gptq:bits=2,group=64,free=true"


def measure(args: argparse.Namespace, layers: int, what: str) -> dict[str, Any]:
    device = torch.device(args.device)
    torch.manual_seed(0)
    source = RandomWeights(args.shape, "fp16", device=device, layers=layers)
    tokens = torch.randint(0, SHAPES[args.shape]["vocab_size"], (16, args.length))
    training = Training(steps=1000, batch=args.batch, warmup=1, low_memory=True)
    teacher = Teacher.of(
        open_model(source, device), tokens, drawn(len(tokens), training), device, half=True, batch=args.batch
    )
    weights = RandomWeights(args.shape, SCHEME, device=device, layers=layers)
    coders: list[TrainableWeight] = []

    def install(_: int, block: Block) -> None:
        for name, linear in block.linears().items():
            coders.append(trainable(weights.matrix(name), None, what).to(device))
            linear.coder, linear.weight = coders[-1], torch.empty(0)

    student = Network.of(open_model(weights, device), install, recompute=True)
    run = EndToEnd(student, coders, teacher, tokens, training, device)
    # Of the first layer; a low moves only when weights leave the grid, and none has yet.
    watched = [p for c in coders[:7] for name, p in c.named_parameters() if name != "low"]
    before = [p.detach().clone() for p in watched]
    seconds = []
    for step in range(args.steps):
        begun = perf_counter()
        loss = float(run.take(step))
        seconds.append(perf_counter() - begun)
        assert loss < 1e6, loss  # also where it is NaN
    run.step.close()
    moved = [float((a != b).float().mean()) for a, b in zip(before, watched, strict=True)]
    assert min(moved) > 0.5, f"some parameters hardly moved: {moved}"
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    each = teacher.seconds / len(tokens)
    found = {"step_seconds": seconds, "teacher_seconds_per_sequence": each, "peak_bytes": peak, "last_loss": loss}
    return {"what": what, "layers": layers, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="llama3-8b")
    parser.add_argument("--layers", default="2,6")
    parser.add_argument("--what", default="scales,all")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    result: dict[str, Any] = {**environment(), "rows": [], "whole": []}
    result |= {k: getattr(args, k) for k in ("shape", "batch", "length")}
    whole = SHAPES[args.shape]["num_hidden_layers"]
    for what in args.what.split(","):
        rows = []
        for layers in map(int, args.layers.split(",")):
            gc.collect()  # models before, which hold themselves in a circle
            if args.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            rows.append(measure(args, layers, what))
            result["rows"].append(rows[-1])
            args.out.write_text(json.dumps(result, indent=1) + "\n")
            print(rows[-1], flush=True)
        few, many = rows[0], rows[-1]
        told: dict[str, Any] = {"what": what, "layers": whole, "extrapolated_from": [few["layers"], many["layers"]]}
        for name, of in {
            "step_seconds": lambda r: min(r["step_seconds"][1:]),
            "peak_bytes": lambda r: r["peak_bytes"],
        }.items():
            layer = (of(many) - of(few)) / (many["layers"] - few["layers"])
            told[name] = of(many) + layer * (whole - many["layers"])
        result["whole"].append(told)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(told, flush=True)


if __name__ == "__main__":
    main()

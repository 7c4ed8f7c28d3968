"""Families other than Llama from GGUF: the logits of transformers on the same weights, plain and in every grid."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf_models import GEMMA3, GPT2, OLMO2, SMOLLM3, STARCODER2, write_gguf
from torch import Tensor

from crelle import LLM, Sampling, quantize
from crelle.models.loader import load

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {**GPT2, "n_positions": 256},
    "gemma3": {**GEMMA3, "max_position_embeddings": 256, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64},
}
CONFIGS |= {"smollm3": SMOLLM3, "olmo2": OLMO2, "starcoder2": STARCODER2}
CONFIGS["gpt2"] |= {"n_embd": 256, "n_inner": 512}
CONFIGS["gemma3"]["query_pre_attn_scalar"] = 64


def tokens(n: int = 200) -> Tensor:
    return torch.randint(250, (1, n), generator=torch.Generator().manual_seed(3))


def make(name: str) -> Any:
    """A random model of transformers; GGUF's rope bases are Gemma 3's own."""
    torch.manual_seed(5)
    classes: dict[str, tuple[Any, Any]] = {
        "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config),
        "smollm3": (transformers.SmolLM3ForCausalLM, transformers.SmolLM3Config),
        "olmo2": (transformers.Olmo2ForCausalLM, transformers.Olmo2Config),
        "starcoder2": (transformers.Starcoder2ForCausalLM, transformers.Starcoder2Config),
        "gemma3": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig),
    }
    kind, config = classes[name]
    options = {k: v for k, v in CONFIGS[name].items() if k != "model_type"}
    model = kind(config(**options, bos_token_id=1, eos_token_id=2, pad_token_id=None)).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=p.shape[-1] ** -0.5 if p.dim() == 2 else 0.2)
    return model


def arrays(model: Any) -> dict[str, np.ndarray]:
    return {n: p.detach().numpy() for n, p in model.named_parameters()}


def ours(path: Path, chunks: tuple[int, ...]) -> Tensor:
    model, _ = load(path, device="cpu")
    cache = model.new_cache()
    return torch.cat([model(part, cache) for part in tokens(sum(chunks)).split(chunks, dim=1)], dim=1)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make(name)
    path = write_gguf(tmp_path / "m.gguf", CONFIGS[name], arrays(model))
    with torch.inference_mode():
        expected = model(tokens()).logits
    assert expected.std() > 0.1
    assert (ours(path, (200,)) - expected).abs().max() <= 1e-4
    assert (ours(path, (150, 20, *[1] * 30)) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q5_1])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sample(3)
def test_grids_of_gguf_stay_as_they_are(name: str, kind: Type, tmp_path: Path) -> None:
    """A checkpoint that keeps them multiplies by them; its logits are those of the dequantized weights."""
    path = write_gguf(tmp_path / "m.gguf", CONFIGS[name], arrays(make(name)), kind=kind)
    quantize(path, tmp_path / "kept", "keep")
    found = ours(tmp_path / "kept", (60,))
    plain = ours(path, (60,))
    assert (found - plain).norm() < 2e-3 * plain.norm()  # products round activations to 16 bits
    llm = LLM.load(tmp_path / "kept", device="cpu")
    assert len(llm.generate(tokens(9)[0].tolist(), Sampling(max_tokens=4)).tokens) > 0

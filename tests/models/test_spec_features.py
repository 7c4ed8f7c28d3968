"""What specs cover beyond the families that come with Crelle: experts, parallel residuals, partial rope, a head's bias.

Mixtral and Phi-2 are described here, as somebody outside of the tree would, and run against transformers.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import write_tokenizer
from mixtral import MIXTRAL, NAMES, SIZES, attention_of, decoder_of, mixtral_config, randomize
from torch import Tensor

from crelle import LLM, Sampling, quantize
from crelle.kernels.cpu.fused_decoder import supports as cpu_lacks
from crelle.kernels.cuda.step.decode_step import supports as cuda_lacks
from crelle.kernels.spec import DecoderSpec, LayerSpec, MlpSpec, NormSpec
from crelle.models.families import families
from crelle.models.families.base import Config, Family, TensorNames
from crelle.models.loader import load, read_spec


def phi(c: Config) -> DecoderSpec:
    rotated = c["rope_parameters"]["partial_rotary_factor"]
    attention = attention_of(c, kv_heads=c["num_attention_heads"], rotated=rotated, bias=True)
    mlp = MlpSpec(inner=c["intermediate_size"], activation="gelu_tanh", gated=False)
    norm = NormSpec("layer", c["layer_norm_eps"])
    layer = LayerSpec(attention=attention, mlp=mlp, norm=norm, parallel=True, shared_norm=True)
    return decoder_of(c, layer)


FAMILIES = {
    "mixtral": MIXTRAL,
    "phi": Family(
        model_types=("phi",),
        spec=phi,
        names=lambda _: TensorNames(
            **NAMES, norm="model.final_layernorm", o="self_attn.dense", up="mlp.fc1", down="mlp.fc2"
        ),
        required_biases=True,
    ),
}
MODELS: dict[str, tuple[Any, Any]] = {
    "mixtral": (transformers.MixtralForCausalLM, mixtral_config()),
    "phi": (transformers.PhiForCausalLM, transformers.PhiConfig(**SIZES, partial_rotary_factor=0.5)),
}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Tensor]:
    """A random model on disk, and its logits for `tokens()`."""
    monkeypatch.setitem(families(), request.param, FAMILIES[request.param])
    torch.manual_seed(7)
    kind, config = MODELS[request.param]
    config._attn_implementation = "eager"
    made = kind(config).eval()
    randomize(made)
    with torch.no_grad():
        made.save_pretrained(tmp_path / "m")
        write_tokenizer(tmp_path / "m")
        return tmp_path / "m", made(tokens()).logits


def tokens(n: int = 200) -> Tensor:
    return torch.randint(250, (1, n), generator=torch.Generator().manual_seed(3))


def ours(path: Path, chunks: tuple[int, ...]) -> Tensor:
    model, _ = load(path, device="cpu")
    cache = model.new_cache()
    return torch.cat([model(part, cache) for part in tokens(sum(chunks)).split(chunks, dim=1)], dim=1)


def test_logits_equal_those_of_transformers(model: tuple[Path, Tensor]) -> None:
    path, expected = model
    assert expected.std() > 0.3
    assert (ours(path, (200,)) - expected).abs().max() <= 1e-4
    assert (ours(path, (150, 20, *[1] * 30)) - expected).abs().max() <= 1e-4


def test_it_runs_in_cpp_and_the_cuda_step_lacks_only_experts(model: tuple[Path, Tensor], tmp_path: Path) -> None:
    """Quantized, and in an engine, in which each request has the same tokens as alone."""
    path, expected = model
    _, weights = load(path, device="cpu")
    spec = read_spec(weights)
    assert cpu_lacks(spec) is None
    assert cuda_lacks(spec, torch.float16) is None
    quantize(path, tmp_path / "q", "rtn:bits=8,group=16")
    assert (ours(tmp_path / "q", (200,)) - expected).norm() < 0.2 * expected.norm()  # routers may choose others
    llm = LLM.load(tmp_path / "q", device="cpu")
    llm.end_ids = frozenset()
    prompts = [tokens(n)[0].tolist() for n in (2, 30, 17)]
    together = llm.generate(prompts, Sampling(max_tokens=6))
    assert [c.tokens for c in together] == [llm.generate([p], Sampling(max_tokens=6))[0].tokens for p in prompts]

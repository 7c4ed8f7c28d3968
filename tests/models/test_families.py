"""Every family against transformers: logits of a random model, by one pass and by chunks; quantized, tuned, served.

A family is one file in crelle.models.families and one entry in FAMILIES here. Llama and OPT have more tests of their
own (test_llama_parity.py, test_opt.py).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import write_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from crelle import LLM, Sampling, quantize
from crelle.errors import FormatError, UnsupportedError
from crelle.models.families import families
from crelle.models.loader import load
from crelle.quantize_job.data import CalibrationData
from crelle.quantize_job.tune import tune_checkpoint
from crelle.quantizers.training.blockwise import Training

TOKENS = 200
COMMON = {"vocab_size": 259, "bos_token_id": 256, "eos_token_id": 258}
GEMMA3 = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 6,  # the last of which has no window
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "query_pre_attn_scalar": 24,
    "max_position_embeddings": 256,
    "sliding_window": 32,
    "pad_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 72, "n_layer": 3, "n_head": 6, "n_positions": 256}),
    "gpt2, exact gelu, scores by layer, a head of its own": (
        "GPT2",
        {
            "n_embd": 72,
            "n_layer": 3,
            "n_head": 6,
            "n_inner": 100,
            "n_positions": 256,
            "activation_function": "gelu",
            "scale_attn_by_inverse_layer_idx": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma2": ("Gemma2", {**GEMMA3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3, capped logits, another scale, other ropes": (
        "Gemma3",
        {
            **GEMMA3,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 37,
            "num_key_value_heads": 4,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e5},
            },
            "tie_word_embeddings": False,
        },
    ),
}
CLASSES, CONFIGS = {"GPT2": "GPT2LMHeadModel"}, {"Gemma3": "Gemma3TextConfig"}
# Those that are quantized too, with fewer layers, of either kind.
MAIN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2},
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}


def write_random(to: Path, case: str, **changes: Any) -> Path:
    """Save a model of transformers whose every tensor, biases and norms too, is random and matters."""
    family, options = FAMILIES[case]
    torch.manual_seed(7)
    model = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))(
        getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**{**COMMON, **options, **changes})
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.normal_(std=max(p.shape) ** -0.5 if "wte" not in name else 0.3)
            else:
                one = float("ln_" in name and name.endswith("weight")) if family == "GPT2" else 0.0
                p.normal_(mean=one, std=0.2)
    model.save_pretrained(to)
    write_tokenizer(to)
    return to


@pytest.fixture(scope="module", params=MAIN)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model on disk. Do not write to it."""
    return write_random(tmp_path_factory.mktemp("family"), request.param, **MAIN[request.param])


def random_tokens(n: int = TOKENS, batch: int = 1) -> Tensor:
    return torch.randint(250, (batch, n), generator=torch.Generator().manual_seed(3))


def theirs(path: Path, tokens: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(tokens).logits


def ours(path: Path, tokens: Tensor, chunks: tuple[int, ...] = (TOKENS,), kv: str = "16", **options: Any) -> Tensor:
    model, _ = load(path, device="cpu", **options)
    cache = model.new_cache(len(tokens), kv=kv)
    return torch.cat([model(part, cache) for part in tokens.split(chunks, dim=1)], dim=1)


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    """In one pass, and by a prompt, chunks and single tokens."""
    path, tokens = write_random(tmp_path, case), random_tokens()
    expected = theirs(path, tokens)
    assert expected.std() > 0.3  # otherwise a small difference would mean nothing
    assert (ours(path, tokens) - expected).abs().max() <= 1e-4
    assert (ours(path, tokens, (110, 4, 36, *[1] * 50)) - expected).abs().max() <= 1e-4


def test_an_engine_gives_each_request_what_it_gets_alone(path: Path) -> None:
    """Batches of requests of different lengths, a prefix in common, pages of 16 and of 4 bits."""
    prompts = [random_tokens()[0, :n].tolist() for n in (3, 40, 90, 41)]
    for kv in ("16", "4"):
        llm = LLM.load(path, device="cpu", kv=kv)
        llm.end_ids = frozenset()
        together = llm.generate(prompts, Sampling(max_tokens=12))
        alone = [llm.generate([p], Sampling(max_tokens=12))[0] for p in prompts]
        assert [c.tokens for c in together] == [c.tokens for c in alone]
    expected = theirs(path, torch.tensor([prompts[1] + together[1].tokens]))[0, 39:-1]
    chosen = expected.gather(1, torch.tensor(together[1].tokens)[:, None])[:, 0]
    assert (expected.amax(-1) - chosen).mean() < 0.5 * expected.std()  # 4 bits: near the best


TEXT = CalibrationData(text="All that glitters is not gold, and many a man his life has sold. " * 40, rows=8, length=64)


@pytest.mark.parametrize(
    ("scheme", "most"),
    [
        ("rtn:bits=8,group=24", 0.02),
        ("bcq-nested:bits=4,group=24,data=false", 0.5),
        ("gptq:bits=8,group=24", 0.05),
        ("awq:bits=8,group=24", 0.05),
        ("auto:bits=4.5,steps=1", 0.7),
    ],
)
@pytest.mark.sample(2)
def test_quantized(scheme: str, most: float, path: Path, tmp_path: Path) -> None:
    """By every kind of scheme: close to the model where bits are many; the checkpoint needs no other names any more."""
    quantize(path, tmp_path / "q", scheme, text=TEXT, device="cpu")
    tokens = random_tokens(60)
    full, coded = ours(path, tokens, (60,)), ours(tmp_path / "q", tokens, (60,))
    error = float((full - coded).norm() / full.norm())
    assert 0 < error < most
    assert (ours(tmp_path / "q", tokens, (20, 30, *[1] * 10)) - coded).abs().max() < 2e-3
    if "nested" in scheme:
        coarse = ours(tmp_path / "q", tokens, (60,), bits=2)
        assert error < float((full - coarse).norm() / full.norm())


def test_tuned(path: Path, tmp_path: Path) -> None:
    quantize(path, tmp_path / "q", "rtn:bits=3,group=24", device="cpu")
    training = Training(steps=6, batch=4)
    tune_checkpoint(tmp_path / "q", path, tmp_path / "t", training, text=TEXT.text, length=64, device="cpu")
    tokens = random_tokens(60)
    full, before, after = (ours(p, tokens, (60,)) for p in (path, tmp_path / "q", tmp_path / "t"))
    assert not torch.equal(before, after)
    assert (after - full).norm() < 1.1 * (before - full).norm()


def test_a_config_of_another_kind_is_refused(path: Path, tmp_path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    for key in ("activation_function", "hidden_activation"):
        if key in config:
            (tmp_path / "config.json").write_text(json.dumps({**config, key: "swish"}))
            with pytest.raises(UnsupportedError, match="the activation 'swish' is not"):
                load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": "many"}))
    with pytest.raises(FormatError, match="'vocab_size'"):
        load(tmp_path)


def test_families_are_found_by_their_files() -> None:
    assert {"llama", "opt", "gpt2", "gemma3_text"} <= families().keys()


def test_gemma_and_gpt_oss_compute_in_bf16_on_a_gpu_and_others_in_f16() -> None:
    """Their activations exceed 65,504; on a CPU all compute in f32."""
    halves = {name: family.half for name, family in families().items()}
    assert {name for name, half in halves.items() if half == torch.bfloat16} == {"gemma2", "gemma3_text", "gpt_oss"}
    assert set(halves.values()) == {torch.float16, torch.bfloat16}

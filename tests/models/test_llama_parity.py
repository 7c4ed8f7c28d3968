"""Our f32 logits against transformers on the same weights, for every family and every option of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from crelle import LLM, Sampling
from crelle.models.loader import load

TOLERANCE = 1e-4  # largest difference of a logit
TOKENS = 200
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, one key head per head": ("Llama", {"num_key_value_heads": 4}),
    "llama, grouped heads": ("Llama", {}),
    "llama, a single key head": ("Llama", {"num_key_value_heads": 1}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, attention bias": ("Llama", {"attention_bias": True}),
    "llama, feed-forward bias": ("Llama", {"mlp_bias": True}),
    "llama, wide heads": ("Llama", {"head_dim": 24}),
    "llama, other theta and eps": ("Llama", {"rope_parameters": {"rope_theta": 500000.0}, "rms_norm_eps": 1e-3}),
    "llama 3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, linear rope": ("Llama", {"rope_parameters": LINEAR}),
    "mistral, short window": ("Mistral", {"sliding_window": 24}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, window in every layer": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0},
    ),
    "qwen2, window after a layer": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen2, window turned off": ("Qwen2", {"use_sliding_window": False, "sliding_window": 24, "max_window_layers": 0}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3, attention bias": ("Qwen3", {"head_dim": 24, "attention_bias": True}),
    "qwen3, window after a layer": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
}

# What an option of a case replaces: without it the same weights must give other logits, or the case shows nothing.
PLAIN: dict[str, dict[str, Any]] = {
    "llama, other theta and eps": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "llama 3 rope": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "llama, linear rope": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "mistral, short window": {"sliding_window": None},
    "qwen2, window in every layer": {"layer_types": ["full_attention"] * 3},
    "qwen2, window after a layer": {"layer_types": ["full_attention"] * 3},
    "qwen3, window after a layer": {"layer_types": ["full_attention"] * 3},
}


def write_random(to: Path, family: str, **options: Any) -> Path:
    """Save a model of transformers whose every tensor, biases and norms too, is random and matters."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.normal_(std=p.shape[1] ** -0.5)
            else:
                p.normal_(mean=float("norm" in name), std=0.2)
    model.save_pretrained(to)
    return to


def change_config(path: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in drop} | changes
    (path / "config.json").write_text(json.dumps(config))


def theirs(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(tokens).logits


def ours(path: Path, tokens: torch.Tensor, chunks: tuple[int, ...] = (TOKENS,)) -> torch.Tensor:
    """Our logits of some tokens, given in chunks that the cache holds together."""
    model, _ = load(path, device="cpu")
    cache = model.new_cache()
    return torch.cat([model(part, cache) for part in tokens.split(chunks, dim=1)], dim=1)


def random_tokens(vocabulary: int, n: int = TOKENS) -> torch.Tensor:
    return torch.randint(vocabulary, (1, n), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    """In one pass, and by a prompt, a chunk and single tokens, which may take other paths."""
    family, options = CASES[case]
    path, tokens = write_random(tmp_path, family, **options), random_tokens(128)
    expected = theirs(path, tokens)
    assert expected.std() > 0.3  # otherwise a small difference would mean nothing
    assert (ours(path, tokens) - expected).abs().max() <= TOLERANCE
    decoded = ours(path, tokens, chunks=(110, 4, 36, *[1] * 50))
    assert (decoded - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("case", PLAIN)
def test_option_changes_the_logits(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    path, tokens = write_random(tmp_path, family, **options), random_tokens(128)
    with_option = ours(path, tokens)
    change_config(path, **PLAIN[case])
    assert (ours(path, tokens) - with_option).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("family", "options", "changes"),
    [
        ("Llama", {"rope_parameters": LLAMA3}, {"rope_theta": 10000.0, "rope_scaling": LLAMA3}),
        ("Llama", {"rope_parameters": LINEAR}, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("Llama", {"rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 5e5, "rope_scaling": None}),
        ("Llama", {"num_key_value_heads": 4}, {"num_key_value_heads": None, "head_dim": None}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}, {}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "head_dim": 16}, {}),
    ],
    ids=["llama3 rope", "linear rope", "theta", "heads left out", "qwen2 window", "qwen3 window"],
)
def test_configs_of_older_transformers_mean_the_same(
    family: str, options: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    path, tokens = write_random(tmp_path, family, **options), random_tokens(128)
    expected = theirs(path, tokens)
    change_config(path, drop=("rope_parameters", "layer_types"), **changes)
    assert (ours(path, tokens) - expected).abs().max() <= TOLERANCE


def test_window_options_that_are_left_out_get_the_defaults_of_transformers(tmp_path: Path) -> None:
    options = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    path, tokens = write_random(tmp_path, "Qwen2", **options), random_tokens(128)
    change_config(path, drop=("layer_types", "max_window_layers"))
    assert (ours(path, tokens) - theirs(path, tokens)).abs().max() <= TOLERANCE


# Real models -------------------------------------------------------------------------------------------------------

PROMPTS = (
    "Once upon a time, there was a little",
    "Tom and his dog went to the park. They",
    "The sun was hot and the",
    "Lily wanted to bake a cake with her mom, but",
    "One day a big red bird",
)


def check_real_model(llm: LLM, peer: Any, text: str) -> None:
    """Compare logits over 200 tokens of a text and 64 greedy tokens after each of five prompts."""
    tokens = torch.tensor([llm.tokenizer.encode(text)[:TOKENS]])
    assert tokens.shape[1] == TOKENS
    with torch.inference_mode():
        expected = peer(tokens).logits
    assert (llm.model(tokens, llm.model.new_cache()) - expected).abs().max() <= TOLERANCE
    llm.end_ids = frozenset()  # go on past the end
    first, *others = (llm.tokenizer.encode(prompt) for prompt in PROMPTS)
    answers = [llm.generate(first, Sampling(max_tokens=64)), *llm.generate(others, Sampling(max_tokens=64))]
    for ids, found in zip((first, *others), (answer.tokens for answer in answers), strict=True):
        with torch.inference_mode():  # each is the most likely after those before it: what greedy steps would give
            logits = peer(torch.tensor([ids + found])).logits[0, len(ids) - 1 : -1]
        assert len(found) == 64
        assert found == logits.argmax(-1).tolist()


def test_stories15m_equals_transformers(data: Path) -> None:
    peer = AutoModelForCausalLM.from_pretrained(data / "stories15M", dtype=torch.float32)
    text = (data / "text" / "tinystories-test.txt").read_text()[:2000]
    check_real_model(LLM.load(data / "stories15M", device="cpu"), peer, text)


def smollm2_of_transformers(file: Path) -> Any:
    """SmolLM2 as transformers itself reads it from GGUF: its names, its decoding, its undoing of the rope order."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = load_gguf_checkpoint(file)["config"]
    wanted = set(SIZES) | {"head_dim", "tie_word_embeddings"}
    rope = {"rope_theta": config["rope_theta"], "rope_type": "default"}
    config = transformers.LlamaConfig(**{k: v for k, v in config.items() if k in wanted}, rope_parameters=rope)
    model = transformers.LlamaForCausalLM(config)
    weights = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    assert model.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]  # it is tied
    return model.eval()


@pytest.mark.slow
def test_smollm2_equals_transformers(smollm2_file: Path) -> None:
    from crelle.eval.text import python_documentation

    llm = LLM.load(smollm2_file, device="cpu")
    check_real_model(llm, smollm2_of_transformers(smollm2_file), python_documentation()[:4000])

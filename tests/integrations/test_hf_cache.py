"""CrelleCache: memory, the same tokens by steps as at once, windows, beams, and every format of KVFormat."""

from pathlib import Path

import pytest
import torch
from hf_models import error, tokens, write_model
from transformers import AutoModelForCausalLM, DynamicCache

from crelle.errors import SchemeError
from crelle.integrations.transformers import CrelleCache


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    """With windows of 8 tokens in five of six layers, or without."""
    path: Path = write_model(request.param, tmp_path_factory.mktemp("cache") / "m")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@torch.no_grad()
def run(model: torch.nn.Module, chunks: tuple[int, ...], kv: str | None) -> torch.Tensor:
    cache = DynamicCache(config=model.config) if kv is None else CrelleCache(model.config, kv)
    return torch.cat([model(part, past_key_values=cache).logits for part in tokens(40).split(chunks, dim=1)], 1)


MOST = {"16": 1e-5, "8": 0.05, "4": 0.3, "3": 0.6, "k4v2": 1.0, "2": 1.5, "kv4:group=8,rotate=false,center=false": 0.4}


@pytest.mark.parametrize("kv", MOST)
def test_close_to_a_full_cache(kv: str, model: torch.nn.Module) -> None:
    assert error(run(model, (40,), kv), run(model, (40,), None)) < MOST[kv]


def test_steps_equal_one_pass(model: torch.nn.Module) -> None:
    """What is attended to is what is stored, however it came; the centre is that of the first 20 tokens in both."""
    assert error(run(model, (20, 1, 1, 3, 15), "4"), run(model, (20, 20), "4")) < 1e-5


def test_memory(model: torch.nn.Module) -> None:
    used = {}
    for kv in ("16", "4", "2"):
        cache = CrelleCache(model.config, kv)
        with torch.no_grad():
            model(tokens(40), past_key_values=cache)
        used[kv] = cache.nbytes()
    assert used["4"] < used["16"] / 6  # of f32: 16 channels make one group of 5 bits
    assert used["2"] < used["16"] / 10


def test_generate_with_beams(model: torch.nn.Module) -> None:
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3, "pad_token_id": 0, "eos_token_id": None}
    full = model.generate(tokens(20), past_key_values=DynamicCache(config=model.config), **options)
    assert torch.equal(model.generate(tokens(20), past_key_values=CrelleCache(model.config, 16), **options), full)
    coded = model.generate(tokens(20), past_key_values=CrelleCache(model.config, 8), **options)
    assert coded.shape == full.shape


def test_crop_and_reset(model: torch.nn.Module) -> None:
    if model.config.model_type != "llama":
        return
    cache = CrelleCache(model.config, 4)
    with torch.no_grad():
        first = model(tokens(20), past_key_values=cache).logits
        again = model(tokens(30)[:, 20:], past_key_values=cache).logits
        cache.crop(-10)
        assert cache.get_seq_length() == 20
        assert torch.equal(model(tokens(30)[:, 20:], past_key_values=cache).logits, again)
        cache.reset()
        assert torch.equal(model(tokens(20), past_key_values=cache).logits, first)


def test_an_unknown_format() -> None:
    from transformers import LlamaConfig

    with pytest.raises(SchemeError, match="a KV cache must be one of"):
        CrelleCache(LlamaConfig(), "5")

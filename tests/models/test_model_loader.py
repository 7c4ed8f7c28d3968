"""What the loader accepts, and the sentences with which it refuses the rest."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import write_tiny_model

from crelle.errors import CrelleError, FormatError, UnsupportedError
from crelle.models.loader import choose_device, load


def changed(tiny_model: Path, to: Path, drop: str | None = None, **changes: Any) -> Path:
    """The tiny model's weights under another config."""
    config = json.loads((tiny_model / "config.json").read_text()) | changes
    config.pop(drop, None) if drop else None
    (to / "config.json").write_text(json.dumps(config))
    (to / "model.safetensors").symlink_to(tiny_model / "model.safetensors")
    return to


REFUSED: dict[str, tuple[dict[str, Any], type[CrelleError], str]] = {
    "model type": ({"model_type": "mamba"}, UnsupportedError, "model type 'mamba' is not one that Crelle runs"),
    "no model type": ({"model_type": None}, UnsupportedError, "model type 'None'"),
    "activation": ({"hidden_act": "gelu"}, UnsupportedError, "activation 'gelu'"),
    "rope type": (
        {"rope_parameters": {"rope_type": "ntk", "factor": 2.0}},
        UnsupportedError,
        "rope scaling 'ntk' is not supported",
    ),
    "old rope type": ({"rope_scaling": {"type": "su3"}}, UnsupportedError, "rope scaling 'su3'"),
    "rope without factor": ({"rope_scaling": {"type": "linear"}}, FormatError, "lacks the key 'factor'"),
    "vocabulary": ({"vocab_size": 300}, FormatError, "embed_tokens.weight' is 259 x 72, .* asks for 300 x 72"),
    "width": ({"hidden_size": 64}, FormatError, "is 259 x 72, but the model's config asks for 259 x 64"),
    "inner width": ({"intermediate_size": 99}, FormatError, "gate_proj.weight' is 100 x 72, .* asks for 99 x 72"),
    "heads": (
        {"num_attention_heads": 5},
        FormatError,
        "num_attention_heads' is 5, which 'num_key_value_heads' = 2 cannot share",
    ),
    "more heads": ({"num_attention_heads": 4}, FormatError, "q_proj.weight' is 72 x 72, .* asks for 48 x 72"),
    "key heads": ({"num_key_value_heads": 3}, FormatError, "k_proj.weight' is 24 x 72, .* asks for 36 x 72"),
    "head size": ({"head_dim": 10}, FormatError, "asks for 60 x 72"),
    "too many layers": ({"num_hidden_layers": 4}, FormatError, "has 4 layers .* no tensor of layer 3"),
    "no heads": ({"num_attention_heads": 0, "head_dim": None}, FormatError, "from 1 to 16,384, but is 0"),
    "words for numbers": ({"hidden_size": "wide"}, FormatError, "hidden_size' .* an integer .* but is 'wide'"),
    "layers without end": (
        {"num_hidden_layers": 2**29},
        FormatError,
        r"config.json: 'num_hidden_layers' \(layers\) should be an integer from 1 to 4,096, but is 536870912",
    ),
    "eps in words": ({"rms_norm_eps": "x"}, FormatError, "rms_norm_eps' .* a number from 0 to 1, but is 'x'"),
    "half a window": (
        {"model_type": "mistral", "sliding_window": 1.5},
        FormatError,
        "sliding_window' .* should be an integer .* but is 1.5",
    ),
    "short layer types": (
        {"model_type": "qwen2", "sliding_window": 8, "layer_types": ["full_attention"]},
        FormatError,
        "layer_types' has 1 entries, but 'num_hidden_layers' is 3",
    ),
    "odd layer types": (
        {"model_type": "qwen3", "sliding_window": 8, "layer_types": ["full_attention", {}, "linear"]},
        FormatError,
        "layer_types' should name full_attention or sliding_attention, but has {}",
    ),
    "head of -1": ({"head_dim": -1}, FormatError, "head_dim' .* from 2 to 4,096, but is -1"),
    "odd head": ({"head_dim": 11}, FormatError, "11 wide, .* even"),
    "truth for a number": ({"num_hidden_layers": True}, FormatError, "an integer .* but is True"),
    "number for truth": ({"tie_word_embeddings": 1}, FormatError, "tie_word_embeddings' .* true or false, but is 1"),
    "huge integer": ({"vocab_size": 10**400}, FormatError, r"vocab_size' .* but is 10{80,}\.\.\."),
    "long text": ({"hidden_act": "x" * 10**6}, UnsupportedError, r"x{40}'\.\.\. \(1,000,000 characters\)"),
    "rope as a list": ({"rope_scaling": [1, 2]}, FormatError, "rope_scaling' .* should be an object"),
    "rope factor": ({"rope_scaling": {"type": "linear", "factor": 0}}, FormatError, "factor' .* from 0.001 to"),
    "rope theta": ({"rope_theta": -1}, FormatError, "rope_theta' .* but is -1"),
    "rope bounds": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 64,
            }
        },
        FormatError,
        "low_freq_factor' is 4, which should be less",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_config_that_cannot_be_run_is_refused_with_a_sentence(case: str, tiny_model: Path, tmp_path: Path) -> None:
    changes, error, sentence = REFUSED[case]
    with pytest.raises(error, match=sentence):
        load(changed(tiny_model, tmp_path, **changes), device="cpu")


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size"]
)
def test_config_without_a_size_is_refused(key: str, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=f"lacks the key '{key}'"):
        load(changed(tiny_model, tmp_path, drop=key), device="cpu")


def test_bias_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(71)
    safetensors.torch.save_file(tensors, path / "model.safetensors")
    with pytest.raises(FormatError, match=r"q_proj\.bias' is 71, but the model's config asks for 72"):
        load(path, device="cpu")


def test_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, path / "model.safetensors")
    with pytest.raises(FormatError, match=r"has no tensor 'model\.norm\.weight'"):
        load(path, device="cpu")


def test_context_defaults_when_the_config_has_none(tiny_model: Path, tmp_path: Path) -> None:
    model, _ = load(changed(tiny_model, tmp_path, max_position_embeddings=None), device="cpu")
    assert model.spec.context == 2048


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        choose_device("cuda")
    with pytest.raises(UnsupportedError, match="no device 'tpu'; choose cpu, cuda or auto"):
        choose_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    assert choose_device("cpu") == torch.device("cpu")


def test_all_linear_layers_are_listed_in_the_order_in_which_they_run(tiny_model: Path) -> None:
    model, _ = load(tiny_model, device="cpu")
    names = [layer.name for layer in model.linears()]
    assert len(names) == 3 * 7 + 1
    assert names[:4] == [f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"]
    assert names[-1] == "lm_head"
    assert {layer.kernel for layer in model.linears()} == {"dense"}

"""from_pretrained of Crelle checkpoints: formats and families, against dequantized weights and our engine."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import quantized_copy
from foreign_packers import gptq, write_models
from hf_models import FAMILIES, error, logits, own_logits, tokens, write_model
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from crelle import CrelleConfig, quantize
from crelle.errors import FormatError, UnsupportedError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.io import read_json, to_json
from crelle.integrations.transformers import CrelleLinear

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # said once on CPUs without bf16 products
TIGHT = 3e-4  # against the dequantized weights: the CPU kernels round inputs to 16 bits or so
ENGINE = 5e-4  # against our engine, whose prefill has kernels of its own
LOOSE = 2e-2  # where activations are quantized: a rounding may fall on the other side
NOT_OURS = ("phi",)  # families that our engine does not run


def load(path: Path, **options: object) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)


def dequantized(checkpoint: Path, to: Path) -> Path:
    """A plain model with a checkpoint's values."""
    from safetensors.torch import save_file

    weights = Checkpoint(checkpoint)
    to.mkdir()
    save_file({n: weights.read(n).contiguous() for n in weights.names()}, to / "model.safetensors", {"format": "pt"})
    dropped = ("quantization_config", "transformers_weights")
    (to / "config.json").write_bytes(to_json({k: v for k, v in weights.config.items() if k not in dropped}))
    return to


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("models") / "llama", tie_word_embeddings=False)


SCHEMES = {
    "rtn:bits=4,group=32": "uniform",
    "rtn:bits=2,group=16,symmetric=true": "uniform",
    "bcq:bits=3,group=32": "bcq",
    "gptq:bits=3,group=32": "uniform",
    "hbcq:bits=2,group=32": "bcq",
    "mixed:four=0.25,outliers=0.002": "mixed",
    "atom:w=4,a=4,group=16,outliers=16": "grouped",
    "fp16": "dense",
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_formats(scheme: str, llama: Path, tmp_path: Path) -> None:
    made = quantized_copy(llama, tmp_path / "q", scheme)
    model = load(made)
    linear = model.get_submodule("model.layers.1.mlp.down_proj")
    if SCHEMES[scheme] == "dense":
        assert type(linear) is nn.Linear
    else:
        assert isinstance(linear, CrelleLinear)
        assert linear.spec["format"] == SCHEMES[scheme]
    got, quantized_inputs = logits(model), scheme.startswith("atom")
    assert error(got, own_logits(made)) < (LOOSE if quantized_inputs else ENGINE)
    if not quantized_inputs:
        assert error(got, logits(load(dequantized(made, tmp_path / "plain")))) < TIGHT


def test_two_level(llama: Path, tmp_path: Path) -> None:
    made = quantized_copy(llama, tmp_path / "q", "atom:w=4,a=8,group=16,outliers=16,levels=2")
    model = load(made)
    assert model.get_submodule("model.layers.0.mlp.up_proj").spec["format"] == "two-level"
    assert error(logits(model), own_logits(made)) < LOOSE


def test_imported_act_order(tmp_path: Path) -> None:
    """GPTQ with act-order, converted without loss: permuted columns."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "checkpoint_format": "gptq_v2"}
    theirs, plain = write_models(tmp_path, gptq, config, bits=4, group=16, scattered=True)
    quantize(theirs, tmp_path / "q", "keep")
    model = load(tmp_path / "q")
    assert model.get_submodule("model.layers.0.mlp.up_proj").spec["format"] == "permuted"
    assert error(logits(model), logits(load(plain))) < TIGHT


def test_nested_at_a_chosen_precision(llama: Path, tmp_path: Path) -> None:
    made = quantized_copy(llama, tmp_path / "q", "bcq-nested:bits=4,group=32,data=false")
    assert error(logits(load(made)), own_logits(made)) < ENGINE
    with pytest.warns(UserWarning, match="loading attributes"):
        coarse = load(made, quantization_config=CrelleConfig(bits=2))
    assert error(logits(coarse), own_logits(made, bits=2)) < ENGINE
    with (
        pytest.warns(UserWarning, match="loading"),
        pytest.raises(UnsupportedError, match="serves 2, 3, 4 bits, not 7"),
    ):
        load(made, quantization_config=CrelleConfig(bits=7))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_quantized_embedding_and_head(family: str, tied: bool, tmp_path: Path) -> None:
    source = write_model(family, tmp_path / "m", tie_word_embeddings=tied)
    quantize(source, tmp_path / "q", "rtn:bits=4,group=32", head="rtn:bits=8,group=32")
    model = load(tmp_path / "q")
    assert not [n for n, p in model.named_parameters() if p.ndim == 2]
    assert error(logits(model), own_logits(tmp_path / "q")) < ENGINE
    model.tie_weights()
    model.save_pretrained(tmp_path / "s")
    assert torch.equal(logits(load(tmp_path / "s")), logits(model))
    assert error(own_logits(tmp_path / "s"), logits(model)) < ENGINE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(2)
def test_families(family: str, tmp_path: Path) -> None:
    """Also those that our engine does not run; saved and loaded again bit for bit."""
    source = write_model(family, tmp_path / "m")
    made = quantize(source, tmp_path / "q", "rtn:bits=4,group=16").out
    model = load(made)
    got = logits(model)
    assert error(got, logits(load(source))) > 10 * TIGHT  # it is quantized
    if family not in NOT_OURS:
        assert error(got, own_logits(made)) < ENGINE
    else:
        assert error(got, logits(load(dequantized(made, tmp_path / "plain")))) < TIGHT
    model.save_pretrained(tmp_path / "s")
    assert torch.equal(logits(load(tmp_path / "s")), got)
    assert sorted(Checkpoint(tmp_path / "s").specs) == sorted(Checkpoint(made).specs)
    if family not in NOT_OURS:
        assert error(own_logits(tmp_path / "s"), got) < ENGINE


def test_a_base_model_without_its_head(llama: Path, tmp_path: Path) -> None:
    made = quantized_copy(llama, tmp_path / "q", "rtn:bits=4,group=32")
    whole = load(made)
    base = AutoModel.from_pretrained(made, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(whole.model(tokens()).last_hidden_state, base(tokens()).last_hidden_state)


def test_half_precision_leaves_scales_alone(llama: Path, tmp_path: Path) -> None:
    made = quantized_copy(llama, tmp_path / "q", "rtn:bits=4,group=32")
    model, half = load(made), AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.up_proj"
    a, b = (m.get_submodule(name) for m in (model, half))
    assert torch.equal(a.scale, b.scale)
    assert a.scale.dtype == b.scale.dtype == torch.float16
    moved = copy.deepcopy(a).to(torch.bfloat16)
    assert torch.equal(moved.scale, a.scale)
    assert moved.scale.dtype == torch.float16
    assert error(logits(half), logits(model)) < 0.05


def test_copies_are_weights_of_their_own(llama: Path, tmp_path: Path) -> None:
    model = load(quantized_copy(llama, tmp_path / "q", "rtn:bits=4,group=32"))
    want = logits(model)
    copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model.model.layers[0].mlp))
    x = torch.randn(1, 64)
    assert torch.equal(unpickled(x), model.model.layers[0].mlp(x))
    copied.model.layers[0].mlp.up_proj.scale.zero_()
    assert torch.equal(logits(model), want)
    assert not torch.equal(logits(copied), want)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_a_state_dict_counts_after_a_forward_pass(tied: bool, assign: bool, tmp_path: Path) -> None:
    """A linear, an embedding and the head multiply by what was loaded last, not by what they prepared before."""
    source = write_model("llama", tmp_path / "m", tie_word_embeddings=tied)
    quantize(source, tmp_path / "q", "rtn:bits=4,group=32", head="rtn:bits=8,group=32")
    model, other = load(tmp_path / "q"), load(tmp_path / "q")
    for name, part in other.named_buffers():
        if name.endswith(".scale"):
            part.mul_(1.5 if "embed" in name else 0.5)
    before, want = logits(model), logits(other)
    assert not torch.equal(before, want)
    model.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(logits(model), want)


def write_in_place(layer: nn.Module, scale: torch.Tensor) -> None:
    layer.scale.copy_(scale)


def replace_buffer(layer: nn.Module, scale: torch.Tensor) -> None:
    """As accelerate does it (set_module_tensor_to_device)."""
    layer._buffers["scale"] = scale


def set_attribute(layer: nn.Module, scale: torch.Tensor) -> None:
    layer.scale = scale


def load_one_layer(layer: nn.Module, scale: torch.Tensor) -> None:
    layer.load_state_dict({"scale": scale}, strict=False)


@pytest.mark.parametrize("change", [write_in_place, replace_buffer, set_attribute, load_one_layer])
def test_changed_parts_count_after_a_forward_pass(
    change: Callable[[nn.Module, torch.Tensor], None], tmp_path: Path
) -> None:
    """Of a linear and of an embedding."""
    source = write_model("llama", tmp_path / "m", tie_word_embeddings=False)
    quantize(source, tmp_path / "q", "rtn:bits=4,group=32", head="rtn:bits=8,group=32")
    model = load(tmp_path / "q")
    for name in ("model.layers.0.mlp.down_proj", "model.embed_tokens"):
        layer = model.get_submodule(name)
        before = logits(model)
        change(layer, layer.scale * 0.5)
        changed = logits(model)
        assert not torch.equal(changed, before)
        assert torch.equal(changed, logits(copy.deepcopy(model)))


def test_parts_made_in_inference_mode_are_multiplied_by(llama: Path, tmp_path: Path) -> None:
    """Their writes are not counted, and asking for the count is an error."""
    made = quantized_copy(llama, tmp_path / "q", "rtn:bits=4,group=32")
    with torch.inference_mode():
        model = load(made)
    assert torch.equal(logits(model), logits(load(made)))


def test_damaged_and_newer_checkpoints(llama: Path, tmp_path: Path) -> None:
    made = quantized_copy(llama, tmp_path / "q", "rtn:bits=4,group=32")
    config = read_json(made / "config.json")
    shard = next(made.glob("crelle-00002-*"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(FormatError, match="was altered"):
        load(made)
    shard.write_bytes(whole)
    newer = config | {"quantization_config": config["quantization_config"] | {"format_version": 2}}
    (made / "config.json").write_bytes(to_json(newer))
    with pytest.raises(FormatError, match="A newer Crelle may read it"):
        load(made)
    (made / "config.json").write_bytes(to_json(config | {"intermediate_size": 80}))
    with pytest.raises(FormatError, match="asks for 64 x 80"):
        load(made)

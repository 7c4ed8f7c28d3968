"""Experts that transformers saved fused, in tensors of three dimensions: quantized like those of other files."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from conftest import write_tokenizer
from hf_models import error, logits, write_model
from mixtral import MIXTRAL, mixtral_config, randomize
from typer.testing import CliRunner

from crelle import quantize
from crelle.cli.commands.inspect import describe
from crelle.cli.main import app
from crelle.errors import FormatError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.hf import HFDirectory
from crelle.formats.storage.io import ShardReader
from crelle.formats.storage.open import open_weights
from crelle.models.families import families
from crelle.quantize_job.data import CalibrationData

SCHEME = "rtn:bits=4,group=16"


def fused(source: Path, to: Path) -> Path:
    """Write the same model again as transformers keeps it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    model.save_pretrained(to, save_original_format=False)
    write_tokenizer(to)
    names = safetensors.torch.load_file(to / "model.safetensors")
    assert any(t.dim() == 3 for t in names.values())
    return to


def load(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_fused_experts_are_quantized_like_single_ones(family: str, tmp_path: Path) -> None:
    source = write_model(family, tmp_path / "m")
    one, other = open_weights(source), open_weights(fused(source, tmp_path / "f"))
    assert sorted(one.names()) == sorted(other.names())
    for name in one.names():
        assert one.shape(name) == other.shape(name) == tuple(other.read(name).shape)
        assert torch.equal(one.read(name), other.read(name)), name
    made = [quantize(weights.path, tmp_path / f"{i}", SCHEME) for i, weights in enumerate((one, other))]
    assert made[0].bits_per_weight == made[1].bits_per_weight < 6
    assert made[0].bytes == made[1].bytes
    assert not made[1].warnings
    a, b = (Checkpoint(report.out) for report in made)
    assert a.specs == b.specs
    for module in a.specs:
        parts = b.matrix(module).tensors()
        assert all(torch.equal(t, parts[part]) for part, t in a.matrix(module).tensors().items()), module
    assert torch.equal(logits(load(made[0].out)), logits(load(made[1].out)))


@pytest.mark.parametrize("scheme", ["fp32", "keep"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_fused_experts_that_are_only_stored_are_loaded(family: str, scheme: str, tmp_path: Path) -> None:
    source = fused(write_model(family, tmp_path / "m"), tmp_path / "f")
    report = quantize(source, tmp_path / "q", scheme)
    assert error(logits(load(report.out)), logits(load(source))) < 1e-5


def test_one_expert_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fused(write_model("qwen3_moe", tmp_path / "m"), tmp_path / "f")
    largest = 0
    read, read_slice = HFDirectory.read, ShardReader.read_slice

    def whole(self: HFDirectory, name: str) -> torch.Tensor:
        found = read(self, name)
        assert found.dim() < 3, name
        return found

    def part(self: ShardReader, name: str, which: Any) -> torch.Tensor:
        nonlocal largest
        found = read_slice(self, name, which)
        largest = max(largest, found.numel())
        return found

    monkeypatch.setattr(HFDirectory, "read", whole)
    monkeypatch.setattr(ShardReader, "read_slice", part)
    quantize(source, tmp_path / "q", SCHEME)
    assert largest == 32 * 64  # [moe_intermediate_size, hidden_size]


def test_fused_experts_of_a_family_with_experts_are_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families(), "mixtral", MIXTRAL)
    torch.manual_seed(7)
    model = transformers.MixtralForCausalLM(mixtral_config(num_hidden_layers=2))
    randomize(model)
    text = CalibrationData(text="It was a small text to calibrate on. " * 30, rows=4, length=32)
    made = []
    for original in (True, False):
        source = tmp_path / f"m{original}"
        model.save_pretrained(source, save_original_format=original)
        write_tokenizer(source)
        out = quantize(source, tmp_path / f"q{original}", "gptq:bits=3,group=16", text=text, device="cpu").out
        made.append(Checkpoint(out))
    for module in made[0].specs:
        assert torch.equal(*(c.matrix(module).dequantize() for c in made)), module


def llama4(to: Path) -> Path:
    """A family of which Crelle takes no experts apart: [experts, inputs, outputs]."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8}
    config = transformers.Llama4TextConfig(**sizes, vocab_size=259, interleave_moe_layer_step=1, pad_token_id=None)
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config)
    model.save_pretrained(to)
    write_tokenizer(to)
    return to


def test_what_cannot_be_quantized_is_said_and_counted(tmp_path: Path) -> None:
    source = llama4(tmp_path / "m")
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    left = {n: t for n, t in tensors.items() if t.dim() == 3}
    assert len(left) == 4
    report = quantize(source, tmp_path / "q", SCHEME)
    (warning,) = (w for w in report.warnings if "cannot be quantized" in w)
    inside = [t for n, t in tensors.items() if ".layers." in n and t.dim() >= 2]
    share = sum(t.numel() for t in left.values()) / sum(t.numel() for t in inside)
    assert warning.startswith(f"4 tensors of the layers ({share:.1%} of their weights) cannot be quantized")
    assert "'model.layers.*.feed_forward.experts.gate_up_proj'" in warning
    assert "8 x 32 x 64" in warning
    plain = 32 * sum(t.numel() for t in left.values())
    matrices = [t for t in inside if t.dim() == 2]
    coded = 5.25 * sum(t.numel() for t in matrices)  # 4 bits, and 20 for the scale and zero point of 16
    assert report.bits_per_weight == pytest.approx((plain + coded) / sum(t.numel() for t in inside))
    facts = describe(report.out)
    assert facts["bits_per_weight"] == report.bits_per_weight
    assert facts["warnings"] == [warning]
    assert {x["name"] for x in facts["unquantized"]} == set(left)


def test_the_commands_say_it(tmp_path: Path) -> None:
    source = llama4(tmp_path / "m")
    told = CliRunner().invoke(app, ["quantize", str(source), str(tmp_path / "q"), "--scheme", SCHEME])
    assert told.exit_code == 0, told.output
    assert told.output.count("4 tensors of the layers") == 2  # before the work, and after it
    told = CliRunner().invoke(app, ["inspect", str(tmp_path / "q")])
    assert "warning: 4 tensors of the layers" in told.output
    told = CliRunner().invoke(app, ["inspect", str(source)])
    assert told.exit_code == 0, told.output


def test_names_are_not_made_of_what_a_file_promises(tmp_path: Path) -> None:
    """A header may say that a tensor has 10⁹ experts, of nothing or of one weight."""
    source = llama4(tmp_path / "m")
    for shapes in ([(1 << 17, 2, 1), (1 << 17, 1, 1)], [(1 << 40, 0, 0), (1 << 40, 0, 0)]):
        both, down = (torch.zeros(shape, dtype=torch.float16) for shape in shapes)
        layer = "model.layers.0.mlp.experts."
        tensors = {f"{layer}gate_up_proj": both, f"{layer}down_proj": down, "lm_head.weight": torch.zeros(2, 2)}
        safetensors.torch.save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        if both.numel():
            with pytest.raises(FormatError, match="more than 262,144 expert matrices"):
                open_weights(source)
        else:
            assert len(open_weights(source).names()) == 3

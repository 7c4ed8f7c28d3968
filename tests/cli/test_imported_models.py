"""Whole models as others quantized them: they run as their numbers do, and become checkpoints without loss."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_packers
import in_process
import pytest
import tiny_gguf as tiny
import torch
from gguf import GGMLQuantizationType as Type

from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import open_weights
from crelle.kernels import cpu
from crelle.kernels.cpu.fused_decoder import FusedDecoder
from crelle.models.loader import build
from crelle.quantizers.pipeline import quantize

TOKENS = torch.randint(0, 259, (2, 24), generator=torch.Generator().manual_seed(0))


def v1(g: foreign_packers.Grid) -> dict[str, torch.Tensor]:
    return foreign_packers.gptq(g, 1)


def gptq(version: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "checkpoint_format": "gptq_v2" if version == 2 else "gptq", "sym": False, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "gptq-4": (foreign_packers.gptq, gptq(2), {"bits": 4, "group": 32}),
    "gptq-3-v1": (v1, gptq(1), {"bits": 3, "group": 32, "lowest": 1}),
    "gptq-4-v1-wide": (v1, gptq(1), {"bits": 4, "group": 32, "lowest": 1, "highest": 16}),
    "gptq-4-act-order": (foreign_packers.gptq, gptq(2, desc_act=True), {"bits": 4, "group": 32, "scattered": True}),
    "gptq-2-row": (foreign_packers.gptq, gptq(2), {"bits": 2, "group": -1}),
    "gptq-8": (foreign_packers.gptq, gptq(2), {"bits": 8, "group": 32, "symmetric": True}),
    "awq-gemm": (foreign_packers.awq_gemm, AWQ, {"bits": 4, "group": 32}),
    "awq-gemv": (foreign_packers.awq_gemv, {**AWQ, "version": "gemv"}, {"bits": 4, "group": 32}),
    "compressed-4": (foreign_packers.compressed, foreign_packers.compressed_config(4, 32), {"bits": 4, "group": 32}),
    "compressed-3": (foreign_packers.compressed, foreign_packers.compressed_config(3, -1), {"bits": 3, "group": -1}),
}
every_model = pytest.mark.parametrize("case", MODELS)


def write(to: Path, case: str) -> tuple[Path, Path]:
    pack, said, grid = MODELS[case]
    return foreign_packers.write_models(to, pack, said, **grid)


def logits(path: Path, kernel: str | None = None) -> torch.Tensor:
    model = build(open_weights(path), torch.device("cpu"), kernel=kernel)
    return model(TOKENS, model.new_cache(2))


def error(y: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((y - wanted).norm() / wanted.norm())


@every_model
def test_logits_are_those_of_the_numbers(tmp_path: Path, case: str) -> None:
    theirs, plain = write(tmp_path, case)
    wanted = logits(plain)
    same = logits(theirs, "dequantized")
    # The same numbers in the same product; sums over permuted inputs are rounded in another order.
    assert torch.equal(same, wanted) or ("act-order" in case and error(same, wanted) < 1e-5)
    assert error(logits(theirs, "reference"), wanted) < 1e-5
    assert error(logits(theirs), wanted) < 1e-3
    if cpu.available() is None:
        assert error(logits(theirs, "cpu"), wanted) < 1e-3


@pytest.mark.skipif(cpu.available() is not None, reason="the C++ core is not built")
def test_act_order_runs_layer_by_layer_and_says_so(tmp_path: Path) -> None:
    theirs, plain = write(tmp_path, "gptq-4-act-order")
    model = build(open_weights(theirs), torch.device("cpu"))
    assert not isinstance(model.decoder, FusedDecoder)
    assert "another order" in model.decoder
    assert {layer.kernel for layer in model.linears()} == {"cpu", "dense"}
    said = in_process.succeed("explain", theirs, "--json").json
    assert said["fused"] is False
    assert "another order" in said["why_not_fused"]
    reference, cache, other = build(open_weights(plain), torch.device("cpu")), model.new_cache(), model.new_cache()
    for token in TOKENS[:1, :6].T:
        step = model(token[None], cache)
        assert error(step, reference(token[None], other)) < 1e-3


@every_model
@pytest.mark.sample(2)
def test_keep_is_a_lossless_conversion(tmp_path: Path, case: str) -> None:
    theirs, plain = write(tmp_path, case)
    report = quantize(theirs, tmp_path / "out", "keep")
    made, source, numbers = Checkpoint(report.out), open_weights(theirs), open_weights(plain)
    assert made.scheme == report.scheme == "keep"
    assert sorted(made.names()) == sorted(source.names())
    assert made.config["quantization_config"]["quant_method"] == "crelle"
    for name in source.names():
        module = name.removesuffix(".weight")
        if len(source.shape(name)) == 2:
            w = made.matrix(module)
            assert w.spec() == source.matrix(module).spec()
            assert torch.equal(w.dequantize(), numbers.read(name).float())
        else:
            assert torch.equal(made.read(name), numbers.read(name))
    assert torch.equal(logits(report.out), logits(theirs))


@every_model
@pytest.mark.sample(3)
def test_they_can_be_quantized_anew(tmp_path: Path, case: str) -> None:
    theirs, plain = write(tmp_path, case)
    scheme = "rtn:bits=3,group=32"
    again = Checkpoint(quantize(theirs, tmp_path / "a", scheme).out)
    direct = Checkpoint(quantize(plain, tmp_path / "b", scheme).out)
    for module in direct.specs:
        assert torch.equal(again.matrix(module).dequantize(), direct.matrix(module).dequantize()), module


def test_commands_take_the_directory_as_it_is(tmp_path: Path) -> None:
    theirs, _ = write(tmp_path, "gptq-4")
    seen = in_process.succeed("inspect", theirs, "--json").json
    assert seen["scheme"] == "quantized by gptq"
    assert seen["bits_per_weight"] == pytest.approx(4 + 20 / 32, abs=0.02)  # a row's zero points fill up a byte
    assert seen["notes"] == []
    assert {x["format"] for x in seen["layers"] if "proj" in x["name"]} == {"uniform"}
    assert (
        in_process.succeed("generate", theirs, "--prompt", "ab", "--max-tokens", 3, "--json").json["text"] is not None
    )


def test_inspect_tells_what_was_decided(tmp_path: Path) -> None:
    pack, said = foreign_packers.gptq, gptq(1, sym=True)
    theirs, _ = foreign_packers.write_models(tmp_path, pack, said, bits=4, group=32, symmetric=True)
    (note,) = in_process.succeed("inspect", theirs, "--json").json["notes"]
    assert "those of v2" in note


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0], ids=lambda k: k.name)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.sample(2)
def test_a_gguf_file_is_kept_without_loss(tmp_path: Path, arch: str, kind: Type) -> None:
    file = tiny.write_tiny_gguf(tmp_path / "m.gguf", arch, kind=kind)
    in_process.succeed("quantize", file, tmp_path / "out", "--scheme", "keep")
    made, source = Checkpoint(tmp_path / "out"), open_weights(file)
    for name in source.names():
        if len(source.shape(name)) == 2:
            w = made.matrix(name.removesuffix(".weight"))
            assert w.format in ("uniform", "affine")
            assert torch.equal(w.dequantize(), source.read(name)), name
        else:
            assert torch.equal(made.read(name), source.read(name))
    assert error(logits(tmp_path / "out"), logits(file)) < 1e-3
    seen = in_process.succeed("inspect", file, "--json").json  # shows what the file holds, not what it would run as
    assert seen["bits_per_weight"] == int(kind.name[1]) + (32 if kind.name.endswith("_1") else 16) / 32


def test_keep_beside_another_scheme(tmp_path: Path) -> None:
    theirs, plain = write(tmp_path, "gptq-4")
    keep = {"*.down_proj": "keep"}
    made = Checkpoint(quantize(theirs, tmp_path / "out", "rtn:bits=2,group=32", overrides=keep).out)
    at = "model.layers.1.mlp"
    assert torch.equal(made.matrix(f"{at}.down_proj").dequantize(), open_weights(plain).read(f"{at}.down_proj.weight"))
    assert (made.matrix(f"{at}.down_proj").bits, made.matrix(f"{at}.up_proj").bits) == (4, 2)

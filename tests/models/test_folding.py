"""The order of down's channels is taken over by the rows of gate and up, biases too; other formats keep theirs."""

from pathlib import Path

import pytest
import torch

from crelle import LLM, CalibrationData, quantize
from crelle.formats.storage.open import open_weights
from crelle.models.builder import Builder
from crelle.models.loader import build

TEXT = CalibrationData(text="The quick brown fox jumps over the lazy dog. " * 60, rows=4, length=48)
SCHEME = "atom:group=16,outliers=8"


def logits(path: Path) -> torch.Tensor:
    model = build(open_weights(path), torch.device("cpu"), dtype=torch.float32)
    return model(torch.arange(20)[None] * 7 % 200, model.new_cache(1))


@pytest.mark.parametrize("overrides", [{}, {"*.up_proj": "rtn:bits=4,group=24"}, {"*.gate_proj": "fp32"}])
def test_a_folded_model_computes_the_same(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, str]
) -> None:
    quantize(tiny_model, tmp_path / "q", SCHEME, text=TEXT, device="cpu", overrides=overrides)
    mlp = LLM.load(tmp_path / "q", device="cpu").model.layers[1].mlp
    folded = logits(tmp_path / "q")
    assert (mlp.down.weight.perm is None) == ("*.up_proj" not in overrides)
    monkeypatch.setattr(Builder, "folds", False)
    assert LLM.load(tmp_path / "q", device="cpu").model.layers[1].mlp.down.weight.perm is not None
    torch.testing.assert_close(folded, logits(tmp_path / "q"), rtol=1e-5, atol=1e-5)


def test_biases_follow(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize(tiny_model, tmp_path / "q", SCHEME, text=TEXT, device="cpu")
    weights = open_weights(tmp_path / "q")
    model = build(weights, torch.device("cpu"), dtype=torch.float32)
    up, down = (f"model.layers.0.mlp.{slot}_proj" for slot in ("up", "down"))
    bias = torch.arange(model.layers[0].mlp.up.weight.shape[0]).float()
    names = frozenset({*weights.names(), f"{up}.bias"})
    builder = Builder(weights, names, torch.float32, torch.device("cpu"), None)
    monkeypatch.setattr(type(weights), "read", lambda self, name: bias)
    linears = builder.mlp_of(model.arch, 0)
    assert torch.equal(linears["up"].bias, bias[weights.matrix(down).perm.long()])  # type: ignore[attr-defined,arg-type]
    assert linears["gate"].bias is None

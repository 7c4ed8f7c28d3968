"""An input that several matrices read is encoded once for all of them."""

from pathlib import Path

import pytest
import torch

from crelle import quantize
from crelle.kernels import ops
from crelle.kernels.reference import Dequantized
from crelle.models.loader import load


def test_q_k_v_and_gate_up_share_an_encoding(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize(tiny_model, tmp_path / "q", "rtn:bits=4,group=24")
    model, _ = load(tmp_path / "q", device="cpu", kernel="dequantized")
    tokens = torch.arange(20)[None]
    expected = model(tokens, model.new_cache())
    encoded: list[int] = []
    right = Dequantized.encode

    def encode(self: Dequantized, x: torch.Tensor, prepared: object) -> ops.Encoded:
        encoded.append(x.shape[1])
        return right(self, x, prepared)

    monkeypatch.setattr(Dequantized, "encode", encode)
    assert torch.equal(model(tokens, model.new_cache()), expected)
    assert len(encoded) == 2 * len(model.spec.layers)  # for q, k and v, and for gate and up

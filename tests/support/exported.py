"""What an exported directory holds, and whether it is the model that was exported."""

from pathlib import Path

import safetensors.torch
import torch

from crelle.formats.storage.open import Weights


def read_all(path: Path) -> dict[str, torch.Tensor]:
    return {n: t for shard in path.glob("*.safetensors") for n, t in safetensors.torch.load_file(shard).items()}


def assert_same_weights(made: Weights, again: Weights) -> None:
    """The same tensors, bit for bit, in the same formats."""
    assert sorted(again.names()) == sorted(made.names())
    for name in made.names():
        if len(made.shape(name)) == 1:
            assert torch.equal(again.read(name), made.read(name))
            continue
        before, after = made.matrix(name.removesuffix(".weight")), again.matrix(name.removesuffix(".weight"))
        assert after.spec() == before.spec()
        assert all(torch.equal(t, after.tensors()[part]) for part, t in before.tensors().items()), name

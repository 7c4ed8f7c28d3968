"""Trellis codes and rotations: values by hand, rings, rows and inputs, files, bad parts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from crelle.errors import FormatError, UnsupportedError
from crelle.formats import parallel
from crelle.formats.base import bits_per_weight, nbytes
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.checkpoint_writer import CheckpointWriter, shard_name
from crelle.formats.trellis import BITS, CODES, ROWS, UNIT, TrellisTensor, rings_of, states_of
from crelle.formats.wrappers.rotated import MAX_BLOCK, RotatedTensor, Rotation
from crelle.kernels import ops
from crelle.kernels.reference import matmul_fp64

KINDS = [(code, bits) for code in CODES.values() for bits in BITS if not (code.weights * bits) % 1]


def random(N: int, K: int, bits: float, code: str = "pair", seed: int = 0) -> TrellisTensor:
    spec = {"shape": [N, K], "bits": bits, "code": code}
    return TrellisTensor.random(spec, torch.Generator().manual_seed(seed))


def rotated(inner: Any, block: int | None = None, out_block: int | None = None) -> RotatedTensor:
    rotation = Rotation.random(inner.shape[1], torch.Generator().manual_seed(1), block)
    outputs = Rotation.random(inner.shape[0], torch.Generator().manual_seed(2), out_block)
    return RotatedTensor(inner, rotation, None if out_block is None else outputs)


def by_hand(q: TrellisTensor, n: int, k: int) -> float:
    """The weight of output n and input k, in Python's integers."""
    ring = int.from_bytes(bytes(q.codes[n // 32, k // 4].tolist()), "little")
    length = 8 * q.codes.shape[2]
    place = n % 32 * 4 + k % 4
    begin = place // q.code.weights * int(q.code.weights * q.bits)
    state = (ring | ring << length) >> begin & 0xFFFF
    product = state * q.code.multiplier & 0xFFFFFFFF
    p = product.to_bytes(4, "little")
    value = sum(p) - 510 if q.code.name == "mul1" else p[place % 2] + p[place % 2 + 2] - 255
    return float(q.scale[n]) / 128 * value


@pytest.mark.parametrize(("code", "bits"), KINDS, ids=lambda v: getattr(v, "name", str(v)))
def test_values_are_those_that_the_layout_says(code: Any, bits: float) -> None:
    q = random(70, 37, bits, code.name)
    w = q.dequantize(torch.float64)
    for n, k in ((0, 0), (0, 3), (31, 3), (32, 4), (69, 36), (5, 17), (63, 35)):
        assert w[n, k] == by_hand(q, n, k)
    states = q.states(slice(None))
    assert torch.equal(rings_of(states, code.shift(bits)), q.codes)
    assert torch.equal(states_of(q.codes, code.shift(bits)), states)
    rings = torch.roll(states, -1, -1) & ((1 << (16 - code.shift(bits))) - 1)
    assert torch.equal(rings, states >> code.shift(bits)), "a state's low bits are the high bits of the one before"


@pytest.mark.parametrize(("code", "bits"), KINDS, ids=lambda v: getattr(v, "name", str(v)))
def test_random_states_are_nearly_gaussian_and_cost_what_is_said(code: Any, bits: float) -> None:
    q = random(128, 512, bits, code.name)
    w = q.dequantize() * 512**0.5
    assert abs(float(w.std()) - 1) < 0.05
    assert abs(float((w**4).mean()) / 3 - 1) < 0.2
    assert bits_per_weight(q) == bits + 16 / 512
    assert TrellisTensor.row_bits(q.spec()) * 128 == 8 * nbytes(q)


def test_rows_are_cut_in_blocks_and_decoded_elsewhere() -> None:
    q = random(100, 40, 2)
    w = q.dequantize()
    aligned = q.rows(slice(32, 100))
    assert isinstance(aligned, TrellisTensor)
    assert torch.equal(aligned.dequantize(), w[32:])
    chosen = torch.tensor([99, 3, 3, 64, -1])
    for which in (slice(5, 60), slice(0, 100, 7), chosen, chosen[:0]):
        assert torch.equal(q.rows(which).dequantize(), w[which])


def test_inputs_are_cut_between_sequences_and_matrices_are_stacked() -> None:
    q = random(64, 40, 2.5)
    w = q.dequantize()
    assert torch.equal(parallel.columns(q, 8, 40).dequantize(), w[:, 8:])
    with pytest.raises(UnsupportedError, match="a sequence has 4 inputs"):
        parallel.columns(q, 6, 40)
    other = random(20, 40, 2.5, seed=3)
    both = parallel.stacked([q, other])
    assert both is not None
    assert torch.equal(both.dequantize(), torch.cat([w, other.dequantize()]))
    assert parallel.stacked([other, q]) is None, "a block of 32 rows is never shared"
    assert parallel.stacked([q, random(32, 40, 2)]) is None


@pytest.mark.parametrize("K", [64, 96, 1536, 50])
def test_a_rotation_changes_no_product(K: int) -> None:
    q = rotated(random(64, K, 2))
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    w = q.dequantize(torch.float64)
    y = q.rotation(x) @ q.inner.dequantize(torch.float64).T
    assert (x @ w.T - y).abs().max() < 1e-12 * y.abs().max()
    assert torch.allclose(q.rotation.undone(q.rotation(x)), x, atol=1e-12)
    assert q.rotation.block == min(MAX_BLOCK, K & -K)
    assert bits_per_weight(q) == bits_per_weight(q.inner) + 8 * -(-K // 8) / (64 * K)


def test_a_rotation_spreads_a_large_value_over_its_block() -> None:
    rotation = Rotation.random(128, torch.Generator())
    x = torch.zeros(128)
    x[5] = 1
    assert torch.allclose(rotation(x).abs(), torch.full((128,), 128**-0.5))


def test_rotated_matrices_are_cut_between_blocks_and_stacked_where_rotated_alike() -> None:
    q = rotated(random(64, 128, 2), block=32)
    w = q.dequantize()
    assert torch.allclose(parallel.columns(q, 32, 96).dequantize(), w[:, 32:96], atol=1e-7)
    with pytest.raises(UnsupportedError, match="32 inputs are rotated together"):
        parallel.columns(q, 0, 40)
    other = rotated(random(32, 128, 2, seed=5), block=32)
    both = parallel.stacked([q, other])
    assert both is not None
    assert torch.equal(both.dequantize(), torch.cat([w, other.dequantize()]))
    turned = RotatedTensor(other.inner, Rotation(other.rotation.packed ^ 1, 128, 32))
    assert parallel.stacked([q, turned]) is None
    assert torch.equal(q.rows(torch.tensor([7, 50])).dequantize(), w[[7, 50]])


@pytest.mark.parametrize(("N", "K", "block", "out_block"), [(64, 96, 96, 64), (72, 576, 576, 36), (44, 40, 20, 1)])
def test_rotated_outputs_and_any_order_change_no_product(N: int, K: int, block: int, out_block: int) -> None:
    q = rotated(random(N, K, 2), block, out_block)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert q.outputs is not None
    y = q.outputs.undone(q.rotation(x) @ q.inner.dequantize(torch.float64).T)
    wanted = x @ q.dequantize(torch.float64).T
    assert (wanted - y).abs().max() < 1e-12 * y.abs().max()
    assert torch.allclose(q.outputs.undone(q.outputs(y)), y, atol=1e-12)
    signs = 8 * (-(-K // 8) + -(-N // 8))
    assert 8 * (nbytes(q) - nbytes(q.inner)) == signs
    assert RotatedTensor.row_bits(q.spec()) == TrellisTensor.row_bits(q.inner.spec()) + -(-signs // N)


def test_rows_of_rotated_outputs_are_whole_blocks_or_decoded() -> None:
    q = rotated(random(192, 32, 2), 32, 24)
    w = q.dequantize()
    whole = q.rows(slice(96, 192))
    assert isinstance(whole, RotatedTensor)
    assert torch.allclose(whole.dequantize(), w[96:], atol=1e-7)
    chosen = torch.tensor([191, 3, 3, 64, -1])
    for which in (slice(5, 60), slice(0, 192, 7), slice(24, 36), chosen, torch.tensor([], dtype=torch.int64)):
        assert torch.allclose(q.rows(which).dequantize(), w[which], atol=1e-7)
    assert torch.allclose(q.rows(slice(0, 192)).dequantize(), w, atol=1e-7)


def test_rotated_outputs_are_stacked_and_inputs_of_them_taken() -> None:
    a, b = rotated(random(64, 64, 2), 32, 32), rotated(random(32, 64, 2, seed=5), 32, 32)
    both = parallel.stacked([a, b])
    assert both is not None
    assert torch.allclose(both.dequantize(), torch.cat([a.dequantize(), b.dequantize()]), atol=1e-7)
    assert parallel.stacked([a, rotated(random(32, 64, 2), 32, 16)]) is None
    assert parallel.stacked([a, rotated(random(32, 64, 2), 32)]) is None
    halves = [parallel.columns(a, 0, 32), parallel.columns(a, 32, 64)]
    assert torch.allclose(torch.cat([h.dequantize() for h in halves], 1), a.dequantize(), atol=1e-7)


def test_products_by_any_kernel_are_those_of_the_dequantized_weight() -> None:
    both = rotated(random(96, 72, 2), 72, 96)
    for q in (random(96, 70, 3, "mul1"), rotated(random(96, 64, 2)), both):
        x = torch.randn(4, q.shape[1], generator=torch.Generator().manual_seed(4))
        y, wanted = ops.matmul(x, ops.prepare(q, torch.float32)), matmul_fp64(x, q)
        assert (y.double() - wanted).abs().max() < 1e-3 * wanted.abs().max()


def test_a_file_gives_back_the_same_bytes(tmp_path: Path) -> None:
    made = {
        "a": random(70, 40, 1.5),
        "b": rotated(random(64, 64, 4, "mul1")),
        "c": rotated(random(44, 96, 2), 96, 44),
    }
    with CheckpointWriter(tmp_path / "out", {"recipe": "toy"}) as writer:
        writer.add(shard_name(1, 1), made, {})
        writer.finish({"model_type": "llama"}, "trellis:bits=2", {})
    read = Checkpoint(tmp_path / "out")
    for name, q in made.items():
        again = read.matrix(name)
        assert again.spec() == q.spec()
        assert all(torch.equal(again.tensors()[part], t) for part, t in q.tensors().items())


def without(name: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(spec: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def setting(**values: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda spec, tensors: spec.update(values)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (setting(bits=5), "should be one of 1, 1.5, 2"),
        (setting(bits=True), "'bits' of the code 'pair'"),
        (setting(bits=10**400), "'bits' of the code"),
        (setting(code="mul1", bits=2.5), "should be one of 1, 2, 3, 4"),
        (setting(code=["pair"]), "'code' should be one of pair, mul1"),
        (setting(shape=[64, 2**30]), r"'codes' should be uint8 \[2, 268435456, 32\]"),
        (setting(more=1), "does not know the key 'more'"),
        (without("scale"), "'scale' is missing"),
    ],
)
def test_bad_parts_are_refused_in_a_sentence(change: Any, sentence: str) -> None:
    q = random(64, 40, 2)
    spec, tensors = q.spec(), dict(q.tensors())
    change(spec, tensors)
    with pytest.raises(FormatError, match=sentence):
        TrellisTensor.from_parts(spec, tensors)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (setting(block=64), "'block' should be the order of a known Hadamard matrix.* divide 96, but is 64"),
        (setting(block=6), "'block' should be the order of a known Hadamard matrix"),
        (setting(block=1 << 40), "'block' should be the order of a known Hadamard matrix"),
        (setting(block=True), "'block' should be the order of a known Hadamard matrix"),
        (setting(block=96.0), "'block' should be the order of a known Hadamard matrix"),
        (setting(block=0), "'block' should be the order of a known Hadamard matrix"),
        (setting(out_block=3), "'out_block' should be the order of a known Hadamard matrix.* divide 64, but is 3"),
        (setting(out_block=None), "'out_block' should be the order of a known Hadamard matrix"),
        (setting(out_block=64), "'out_signs' is missing"),
        (setting(inner=None), "'inner' should be one of"),
        (setting(inner={"format": "rotated", "inner": {"format": "rotated"}}), "'inner' should be one of"),
        (setting(shape=[64, 64]), "the matrix is 64 x 64, but the inner matrix is"),
        (without("signs"), "'signs' is missing"),
    ],
)
def test_bad_rotations_are_refused_in_a_sentence(change: Any, sentence: str) -> None:
    q = rotated(random(64, 96, 2))
    spec, tensors = q.spec(), dict(q.tensors())
    change(spec, tensors)
    with pytest.raises(FormatError, match=sentence):
        RotatedTensor.from_parts(spec, tensors)


def test_a_sign_without_an_input_is_refused() -> None:
    q = rotated(random(32, 20, 2))
    tensors = dict(q.tensors())
    tensors["signs"] = tensors["signs"] | 0x80
    with pytest.raises(FormatError, match="a sign beyond the last of 20 inputs"):
        RotatedTensor.from_parts(q.spec(), tensors)
    q = rotated(random(36, 16, 2), 16, 36)
    tensors = q.tensors() | {"out_signs": q.tensors()["out_signs"] | 0x80}
    with pytest.raises(FormatError, match="a sign beyond the last of 36 outputs"):
        RotatedTensor.from_parts(q.spec(), tensors)


def test_files_without_rotated_outputs_are_as_they_were() -> None:
    q = rotated(random(64, 96, 2))
    assert sorted(q.spec()) == ["block", "format", "inner", "shape"]
    assert sorted(q.tensors()) == ["codes", "scale", "signs"]


def test_scales_train_and_small_ones_are_no_subnormals() -> None:
    q = random(32, 64, 2)
    trained = q.scales()["scale"].float().requires_grad_()
    q.with_scales({"scale": trained}).dequantize().sum().backward()
    wanted = q.values().float().sum(1) * UNIT
    assert trained.grad is not None
    assert torch.allclose(trained.grad, wanted)
    assert float(random(ROWS, 16384, 2).scale.min()) > 2**-14

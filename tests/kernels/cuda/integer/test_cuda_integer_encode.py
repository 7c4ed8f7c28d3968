"""Activations become integers on the CPU, thread by thread: bit by bit those of ActivationSpec.quantize."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated import COMPILER, EmulatedKernel
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.activations import ActivationSpec
from crelle.formats.base import format_of
from crelle.kernels.cuda.integer import integer_encode
from crelle.kernels.cuda.integer.integer_encode import EncodeForm, EncodePlan, encode, encode_each, form_of, supports
from crelle.kernels.cuda.integer.integer_x import IntegerX
from crelle.kernels.cuda.step.activations import Prologue, is_gated
from crelle.kernels.cuda.step.fused_linear import Norm

emulated = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
HALF, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(integer_encode, "load", EmulatedKernel)


def weight(act: ActivationSpec, K: int, outliers: int | None = None, permuted: bool = True, seed: int = 0) -> Any:
    """A matrix of one output that wants such activations; its groups are those of the activations, or 128."""
    n = act.outliers if outliers is None else outliers
    spec = {"format": "grouped", "shape": [1, K], "bits": 4, "group": act.group if act.group < K else 128}
    spec |= {"outliers": n, "outlier_bits": act.outlier_bits, "permuted": permuted, "activation": act.to_json()}
    return format_of(spec).random(spec, torch.Generator().manual_seed(seed))


def check(found: IntegerX, x: Tensor, w: Any) -> None:
    """Compare with the reference, for x in the model's order: codes, scales, padding."""
    s, wanted = w.sizes, w.activation.quantize(x if w.perm is None else x[:, w.perm.long()])
    M = len(x)
    split = -(-s.normal // 128) * 128
    assert found.tokens == M
    assert found.codes.dtype == torch.int8
    assert found.codes.is_contiguous()
    assert found.codes.shape == (-(-M // 8) * 8, split + -(-s.outliers // 128) * 128)
    assert found.scales.shape == (wanted.scales.shape[1], -(-M // 8) * 8)
    codes = found.codes[:M]
    assert torch.equal(codes[:, : s.normal], wanted.codes[:, : s.normal])
    assert torch.equal(codes[:, split : split + s.outliers], wanted.codes[:, s.normal :])
    assert not codes[:, s.normal : split].any()
    assert not codes[:, split + s.outliers :].any()
    assert torch.equal(found.scales[:, :M].T.nan_to_num(-1.0), wanted.scales.nan_to_num(-1.0))


def inputs(M: int, K: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Rows of all kinds: random ones, ties, zeros, one huge value, denormals, and those that are not finite."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=random) * torch.exp(torch.randn(K, generator=random))
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    kinds = [
        lambda row: row.zero_(),
        lambda row: row.mul_(1e-3)[:1].fill_(most),
        lambda row: row.mul_(least / 16),
        lambda row: row.copy_(torch.randint(-7, 8, row.shape, generator=random) + 0.5),  # halfway between codes
        lambda row: row[3:4].fill_(torch.nan),
        lambda row: row[-1:].fill_(-torch.inf),
        lambda row: row.fill_(-most),
        lambda row: row.mul_(2.0**-99 if dtype == BF16 else least),  # scales around 2^-100, or small
    ]
    for row, change in zip(x[1:], kinds, strict=False):
        change(row)
    return x.to(dtype)


SPECS = [
    (ActivationSpec(4, 128, 128, clip=0.9), 640, None),
    (ActivationSpec(8, 128, 0), 512, None),
    (ActivationSpec(3, 64, 64, clip=0.85), 392, None),
    (ActivationSpec(4, 32, 20), 333, None),
    (ActivationSpec(8, 4096, 0), 520, 64),  # one scale for all, the weight has outliers
    (ActivationSpec(8, 8192, 128), 4224, None),  # one scale for a token, one for its outliers
    (ActivationSpec(4, 128, 17), 4501, None),
    (ActivationSpec(4, 48, 40), 301, None),
    (ActivationSpec(3, 16, 8), 96, None),
    (ActivationSpec(4, 128, 0), 7, None),
    (ActivationSpec(4, 128, 30), 30, None),  # outliers only
    (ActivationSpec(4, 200, 100), 2600, None),
    (ActivationSpec(4, 128, 128, clip=0.9, hadamard=True), 704, None),  # 4.5 groups: the last block has 64 channels
    (ActivationSpec(4, 128, 17, hadamard=True), 4501, None),  # 35 groups and 4 channels
    (ActivationSpec(3, 64, 64, clip=0.85, hadamard=True), 392, None),
    (ActivationSpec(4, 32, 20, hadamard=True), 333, None),  # 9 groups and 25 channels, which stay as they are
    (ActivationSpec(4, 128, 0, hadamard=True), 96, None),
]


@emulated
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("permuted", [True, False])
@pytest.mark.parametrize(("act", "K", "outliers"), SPECS, ids=str)
@pytest.mark.sample(6)
def test_integers_are_those_of_the_reference(
    act: ActivationSpec, K: int, outliers: int | None, permuted: bool, dtype: torch.dtype
) -> None:
    w = weight(act, K, outliers, permuted)
    x = inputs(9 if K < 2000 else 7, K, dtype)
    found, total = encode(x, form_of(w), tokens=None)
    assert total is x
    check(found, x, w)


@emulated
def test_no_rows_and_more_rows_than_there_are() -> None:
    w = weight(ActivationSpec(4, 128, 128), 256)
    found, _ = encode(torch.empty(0, 256, dtype=HALF), form_of(w))
    assert (found.tokens, found.codes.shape, found.scales.shape) == (0, (0, 256), (2, 0))
    x = inputs(3, 256, HALF)
    padded, _ = encode(x, form_of(w), tokens=64)
    assert (padded.tokens, padded.codes.shape[0], padded.scales.shape[1]) == (64, 64, 64)
    check(IntegerX(padded.codes[:8], padded.scales[:, :8], 3, HALF), x, w)


def before(x: Tensor, op: Prologue, norm: Norm) -> Tensor:
    """The operation in torch, in f32, rounded where the kernels round."""
    K, v = x.shape[1] // (2 if is_gated(op) else 1), x.float()
    if op == "RMS_NORM":
        normed = (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + norm.eps)).to(x.dtype)
        return normed if norm.weight is None else (normed.float() * norm.weight.float()).to(x.dtype)
    if op == "LAYER_NORM":
        assert norm.weight is not None
        shift = None if norm.bias is None else norm.bias.float()
        return F.layer_norm(v, (K,), norm.weight.float(), shift, norm.eps).to(x.dtype)
    plain = {"PLAIN": lambda t: t, "RELU": F.relu, "GELU": F.gelu, "SILU": F.silu}[op.removesuffix("_MUL")]
    return (plain(v[:, :K]) * v[:, K:]).to(x.dtype) if is_gated(op) else plain(v).to(x.dtype)


@emulated
@pytest.mark.parametrize("op", ["RMS_NORM", "LAYER_NORM", "SILU_MUL", "RELU", "GELU", "GELU_MUL", "PLAIN"])
@pytest.mark.parametrize(
    ("act", "K", "permuted", "dtype"),
    [
        (ActivationSpec(4, 128, 128), 4504, True, HALF),
        (ActivationSpec(4, 128, 128), 4504, False, BF16),
        (ActivationSpec(4, 128, 128, hadamard=True), 4504, True, BF16),
        (ActivationSpec(4, 64, 64, hadamard=True), 4480, False, HALF),
        (ActivationSpec(8, 999, 64), 520, True, BF16),
        (ActivationSpec(8, 999, 64), 520, False, HALF),
        (ActivationSpec(4, 32), 77, False, HALF),
        (ActivationSpec(4, 128, 128), 20488, True, HALF),  # what comes before the wait elsewhere is loaded late
        (ActivationSpec(8, 20488, 128), 20488, False, BF16),
    ],
)
@pytest.mark.sample(8)
def test_what_comes_before_is_fused(
    act: ActivationSpec, K: int, op: Prologue, permuted: bool, dtype: torch.dtype
) -> None:
    """Norms round sums in another order than torch: then a value in a thousand may be the next one."""
    if K > 10000 and "GELU" in op:
        return
    torch.manual_seed(K)
    w = weight(act, K, permuted=permuted)
    x, addend = (torch.randn(3, K * (2 if is_gated(op) else 1)).to(dtype) for _ in range(2))
    some = None if is_gated(op) else addend
    norm = Norm(torch.randn(K).to(dtype), torch.randn(K).to(dtype) if op == "LAYER_NORM" else None, 1e-5)
    found, total = encode(x, form_of(w), op, norm if "NORM" in op else None, some)
    wanted = x if some is None else x + some
    assert torch.equal(total, wanted)
    h = before(wanted, op, norm)
    q = act.quantize(h if w.perm is None else h[:, w.perm.long()])
    s = w.sizes
    at = -(-s.normal // 128) * 128
    codes = torch.cat([found.codes[:3, : s.normal], found.codes[:3, at : at + s.outliers]], 1)
    assert torch.allclose(found.scales[:, :3].T, q.scales, rtol=1e-2 if dtype == BF16 else 2e-3)
    off = (codes.int() - q.codes.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < (0.02 if dtype == BF16 else 0.005)
    if op in ("PLAIN", "RELU"):
        assert not off.any()


@emulated
@pytest.mark.parametrize("permuted", [True, False])
def test_a_norm_whose_factor_is_a_power_of_two_is_exact(permuted: bool) -> None:
    act, K = ActivationSpec(4, 128, 128), 1024
    w = weight(act, K, permuted=permuted)
    torch.manual_seed(0)
    x = (2 * torch.randint(0, 2, (4, K)) - 1).half() * 4  # mean of squares: 16
    gain = torch.randn(K).half()
    found, _ = encode(x, form_of(w), "RMS_NORM", Norm(gain, None, 0.0))
    check(found, (x / 4) * gain, w)


@emulated
def test_weights_that_share_an_input_are_encoded_for_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    class Counted(EmulatedKernel):
        def __call__(self, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
            launches.append(grid)
            super().__call__(grid, *args, **options)

    monkeypatch.setattr(integer_encode, "load", Counted)
    act, K = ActivationSpec(4, 128, 128), 384
    alike = [weight(act, K, seed=seed) for seed in (0, 0, 5)]
    plain, coarse = weight(act, K, permuted=False), weight(ActivationSpec(8, 128, 0), K, permuted=False)
    weights = [*alike, plain, coarse]
    x, addend = inputs(5, K, HALF), torch.randn(5, K).half()
    plan = EncodePlan([form_of(w) for w in weights])
    each, total = encode_each(x, plan, addend=addend)
    assert torch.equal(total.nan_to_num(7), (x + addend).nan_to_num(7))
    for found, w in zip(each, weights, strict=True):
        check(found, x + addend, w)
    assert each[0].codes.data_ptr() == each[1].codes.data_ptr()
    assert [z for *_, z in launches] == [2, 1, 1]
    assert form_of(alike[0]).shares(form_of(alike[1]))
    assert not form_of(alike[0]).shares(form_of(alike[2]))


def test_what_does_not_fit_is_said() -> None:
    assert supports(28672, 128, 224) is None
    assert supports(28672, 128, 2) is None
    assert "up to 32768" in str(supports(40000, 128, 2))
    assert "larger groups" in str(supports(28672, 0, 28672))
    with pytest.raises(UnsupportedError, match="8 bits, not of 16"):
        form_of(weight(ActivationSpec(4, 128, 128, 16), 256))


def test_forms_count_places_and_groups() -> None:
    form = EncodeForm(4501, 17, ActivationSpec(4, 128, 17), None, b"")
    assert (form.normal, form.places, form.groups, form.split) == (4484, 4608 + 128, 37, 4484)
    one = EncodeForm(520, 64, ActivationSpec(8, 9999, 0), None, b"")
    assert (one.places, one.groups, one.split, one.group) == (512 + 128, 1, 520, 520)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("permuted", [True, False])
@pytest.mark.parametrize(("act", "K", "outliers"), SPECS, ids=str)
def test_a_gpu_finds_the_same_integers(
    act: ActivationSpec, K: int, outliers: int | None, permuted: bool, dtype: torch.dtype
) -> None:
    w = weight(act, K, outliers, permuted)
    for M in (1, 9, 130):
        x = inputs(M, K, dtype)
        form = form_of(w.to("cuda"))
        found, _ = encode(x.cuda(), form)
        check(IntegerX(found.codes.cpu(), found.scales.cpu(), M, dtype), x, w)
        again, _ = encode(x.cuda(), form)
        assert torch.equal(found.codes[:M], again.codes[:M])


@pytest.mark.gpu
@pytest.mark.parametrize("K", [4096, 28672])
@pytest.mark.parametrize("op", ["RMS_NORM", "LAYER_NORM", "SILU_MUL"])
def test_a_row_has_the_same_bits_in_any_batch_on_a_gpu(op: Prologue, K: int) -> None:
    form = form_of(weight(ActivationSpec(4, 128, 128), K).to("cuda"))
    x = torch.randn(64, K * (2 if is_gated(op) else 1), device="cuda").half()
    norm = Norm(torch.randn(K, device="cuda").half(), None, 1e-5)
    whole, _ = encode(x, form, op, norm)
    for some in (slice(0, 1), slice(24, 40)):
        found, _ = encode(x[some], form, op, norm)
        assert torch.equal(found.codes[: found.tokens], whole.codes[some])
        assert torch.equal(found.scales[:, : found.tokens], whole.scales[:, some])

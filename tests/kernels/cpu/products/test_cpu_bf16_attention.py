"""Causal attention as bf16 tiles against f64 of the rounded inputs: emulated everywhere, by AMX where there is."""

import pytest
import torch
import torch.nn.functional as F
from tile_kinds import AMX, TILES
from torch import Tensor

from crelle.kernels.cpu import available

if (reason := available()) is not None:
    pytest.skip(f"crelle.kernels.cpu._core {reason}", allow_module_level=True)

from crelle.kernels.cpu import _core
from crelle.kernels.cpu.bf16_attention import causal_attention, supports

pytestmark = pytest.mark.usefixtures("threads_as_before")

BF16 = torch.bfloat16


def inputs(B: int, T: int, H: int, Hkv: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(T * 10_000 + H * 1000 + D)
    shapes = ((B, T, H, D), (B, T, Hkv, D), (B, T, Hkv, D))
    q, k, v = (torch.randn(shape, generator=chance).bfloat16() for shape in shapes)
    return q, k, v


def poisoned(q: Tensor, k: Tensor, v: Tensor, emulate: bool) -> Tensor:
    y = torch.full(q.shape, torch.nan, dtype=BF16)
    _core.causal_attention(q, k, v, y, emulate)
    return y


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.bfloat16().double().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def check(y: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Compare with f64: weights and what comes out are rounded to bf16, each by at most 2^-9 of what a token sees."""
    wanted = exact(q, k, v)
    assert y.dtype == BF16
    assert y.shape == q.shape
    largest = v.double().abs().amax(-1, keepdim=True).cummax(1)[0].repeat_interleave(q.shape[2] // k.shape[2], 2)
    assert ((y.double() - wanted).abs() <= 2**-7 * largest + 1e-30).all()


def mean_error(y: Tensor, wanted: Tensor) -> float:
    return float((y.double() - wanted).abs().mean())


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize(
    ("T", "H", "Hkv", "D"),
    [
        *((T, 4, 2, 64) for T in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 257)),
        *((T, 2, 1, 128) for T in (1, 33, 100)),
        *((70, H, Hkv, 64) for H, Hkv in ((1, 1), (4, 4), (9, 3), (8, 1))),
        *((70, 2, 2, D) for D in (32, 96, 160, 192, 224, 256)),
        *((T, 1, 1, 32) for T in (255, 256, 288, 520)),  # one chunk of keys, two, three
    ],
)
def test_attention_of_any_shape(T: int, H: int, Hkv: int, D: int, emulate: bool) -> None:
    q, k, v = inputs(2, T, H, Hkv, D)
    check(poisoned(q, k, v, emulate), q, k, v)


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_as_exact_as_torch(scale: float, emulate: bool) -> None:
    q, k, v = inputs(1, 300, 3, 1, 64)
    q = q * scale
    wanted = exact(q, k, v)
    ours, theirs = mean_error(poisoned(q, k, v, emulate), wanted), mean_error(by_torch(q, k, v), wanted)
    assert ours <= 1.2 * theirs


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize("scale", [50, 3000, 1e20])
def test_large_scores(scale: float, emulate: bool) -> None:
    """Where one weight is 1 and the others are 0, what comes out is one of the values."""
    q, k, v = inputs(1, 100, 2, 1, 64)
    y = poisoned(q * scale, k, v, emulate)
    assert y.isfinite().all()
    check(y, q * scale, k, v)


@pytest.mark.parametrize("emulate", TILES)
def test_equal_scores_give_the_mean(emulate: bool) -> None:
    q, k, _ = inputs(1, 64, 2, 1, 64)
    v = torch.arange(64)[None, :, None, None].expand(1, 64, 1, 64).to(BF16).contiguous()
    y = poisoned(torch.zeros_like(q), k, v, emulate)
    assert torch.equal(y, (torch.arange(64) / 2)[None, :, None, None].expand_as(y).to(BF16))


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize(("B", "T", "Hkv"), [(2, 100, 3), (1, 300, 1), (1, 40, 1), (3, 257, 2), (1, 1, 1)])
def test_threads_change_nothing(B: int, T: int, Hkv: int, emulate: bool) -> None:
    """Heads of keys are shared out among them, and blocks of queries where heads do not come out even."""
    q, k, v = inputs(B, T, 2 * Hkv, Hkv, 32)
    results = []
    for threads in (1, 2, 3, 4, 7):
        _core.set_threads(threads)
        results.append(poisoned(q, k, v, emulate))
    check(results[0], q, k, v)
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.parametrize("emulate", TILES)
def test_a_sequence_is_the_same_alone_and_among_others(emulate: bool) -> None:
    q, k, v = inputs(3, 70, 6, 3, 64)
    together = causal_attention(q, k, v, emulate=emulate)
    for i in range(3):
        own = slice(i, i + 1)
        assert torch.equal(causal_attention(q[own], k[own], v[own], emulate=emulate), together[own])
        heads = slice(2 * i, 2 * i + 2)
        alone = causal_attention(q[:, :, heads], k[:, :, own], v[:, :, own], emulate=emulate)
        assert torch.equal(alone, together[:, :, heads])


@pytest.mark.parametrize("emulate", TILES)
def test_tokens_do_not_see_later_ones(emulate: bool) -> None:
    q, k, v = inputs(1, 80, 2, 1, 64)
    whole = causal_attention(q, k, v, emulate=emulate)
    for T in (1, 16, 33, 64, 79):
        assert torch.equal(causal_attention(q[:, :T], k[:, :T], v[:, :T], emulate=emulate), whole[:, :T])


@pytest.mark.parametrize("emulate", TILES)
def test_inputs_may_be_f32_and_lie_apart(emulate: bool) -> None:
    q, k, v = inputs(2, 40, 4, 2, 64)
    wanted = causal_attention(q, k, v, emulate=emulate)
    assert wanted.is_contiguous()
    rows = torch.cat((q.flatten(2), k.flatten(2), v.flatten(2)), 2).view(2, 40, 8, 64)
    assert torch.equal(causal_attention(*rows.split((4, 2, 2), 2), emulate=emulate), wanted)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(causal_attention(*turned, emulate=emulate), wanted)
    assert torch.equal(causal_attention(q.float(), k, v.float(), emulate=emulate), wanted)
    assert torch.equal(causal_attention(q.float() * (1 + 2**-11), k, v, emulate=emulate), wanted)  # rounded back
    assert not causal_attention(q.clone().requires_grad_(), k, v, emulate=emulate).requires_grad
    for shape in ((0, 40), (2, 0)):
        empty = torch.zeros(*shape, 4, 64), torch.zeros(*shape, 2, 64), torch.zeros(*shape, 2, 64)
        assert causal_attention(*empty, emulate=emulate).shape == (*shape, 4, 64)


@pytest.mark.parametrize("emulate", TILES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("token", [0, 5, 40, 64, 69])
def test_what_is_not_finite_reaches_only_tokens_that_see_it(token: int, bad: float, emulate: bool) -> None:
    q, k, v = inputs(2, 70, 4, 2, 64)
    clean = poisoned(q, k, v, emulate)
    for name in ("q", "k", "v"):
        given = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
        given[name][1, token, 1, 7] = bad
        found = poisoned(**given, emulate=emulate)
        touched = torch.zeros(found.shape, dtype=torch.bool)
        if name == "q":
            touched[1, token, 1] = True
            hit = touched
        elif name == "k":
            touched[1, token:, 2:] = True
            # A score of -infinity has no weight, and one of infinity has no finite one.
            hit = touched if bad != bad else touched & (q[..., 7:8].sign() == (1 if bad > 0 else -1))
        else:
            touched[1, token:, 2:, 7] = True
            hit = touched
        assert not found[hit].isfinite().any()
        assert found[~touched].isfinite().all()
        # Sums of a block with such values are added up in another order.
        assert torch.allclose(found[~touched].float(), clean[~touched].float(), rtol=2**-7, atol=1e-3)


@pytest.mark.skipif(AMX, reason="this machine has AMX")
def test_without_amx_there_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="no AMX"):
        causal_attention(*inputs(1, 3, 2, 1, 64))


def test_wrong_shapes_and_types_are_refused() -> None:
    q, k, v = inputs(2, 9, 4, 2, 64)
    for said, given in (
        ("q must be f32 or bf16", (q.half(), k, v)),
        ("k must be f32 or bf16", (q, k.double(), v)),
        ("v must be f32 or bf16", (q, k, v.int())),
        (r"q must be \[B, T, H, D\]", (q[0], k, v)),
        (r"q must be \[B, T, H, D\]", (q, k[0], v)),
        (r"q must be \[B, T, H, D\]", (q, k[:, :8], v)),
        (r"q must be \[B, T, H, D\]", (q, k[:1], v)),
        (r"q must be \[B, T, H, D\]", (q, k[..., :32], v)),
        ("a multiple of those of k", (q[:, :, :3], k, v)),
        ("a multiple of those of k", (q[:, :, :0], k, v)),
        ("a multiple of those of k", (q, k[:, :, :0], v[:, :, :0])),
        ("one shape", (q, k, v[:, :8])),
        ("one shape", (q, k, v[..., :32])),
        ("a multiple of 32 channels", (q[..., :40], k[..., :40], v[..., :40])),
        ("a multiple of 32 channels", (q[..., :0], k[..., :0], v[..., :0])),
        ("at most 256", inputs(1, 2, 1, 1, 288)),
    ):
        with pytest.raises(ValueError, match=said):
            causal_attention(*given, emulate=True)


def test_supports() -> None:
    q, k, _ = inputs(2, 9, 4, 2, 64)
    assert supports(q, k)
    for D in (32, 96, 128, 256):
        assert supports(*inputs(1, 2, 9, 3, D)[:2])
    for D in (16, 80, 288):
        assert not supports(*inputs(1, 2, 9, 3, D)[:2])
    assert not supports(q[:, :, :3], k)
    assert not supports(q[:, :8], k)
    assert not supports(q[0], k[0])


def test_the_core_checks_what_it_is_given() -> None:
    q, k, v = inputs(2, 9, 4, 2, 64)
    y = torch.zeros_like(q)
    for said, given in (
        ("must be bf16", (q.float(), k, v, y)),
        ("must be bf16", (q, k, v.half(), y)),
        ("must be bf16", (q, k, v, y.float())),
        (r"k \[B, T, Hkv, D\]", (q, k[:1], v, y)),
        (r"k \[B, T, Hkv, D\]", (q, k[..., :32].contiguous(), v, y)),
        ("k and v must be alike", (q, k, v[:1], y)),
        ("q and y must be alike", (q, k, v, y[:1])),
        ("a multiple of those of k", (q[:, :, :3].contiguous(), k, v, y[:, :, :3].contiguous())),
        ("a multiple of 32 channels", tuple(x[..., :40].contiguous() for x in (q, k, v, y))),
    ):
        with pytest.raises(ValueError, match=said):
            _core.causal_attention(*given, True)
    for given in ((q.transpose(1, 2), k, v, y), (q, k, v, y.transpose(1, 2)), (q[0], k, v, y)):
        with pytest.raises(TypeError):
            _core.causal_attention(*given, True)
    assert not y.any()

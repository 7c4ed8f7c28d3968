"""One token's attention over 16-bit pages against fp64: head sizes, groups, splits, windows, positions, padding."""

import pytest
import torch
from emulated import COMPILER, EmulatedKernel
from plane_weights import random_weight
from torch import Tensor

from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels import cuda
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.attention import decode_attention
from crelle.kernels.cuda.planes import bmma_gemv, weight_layout
from crelle.kernels.reference_attention import AttendOptions

gpu = pytest.mark.gpu
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
CASES = [  # head size, heads, key/value heads, batch, longest, window, dtype, rotated, normed, by cluster
    (128, 32, 32, 1, 256, None, torch.float16, True, False, True),
    (128, 32, 32, 1, 256, None, torch.float16, True, False, False),
    (128, 32, 8, 4, 2048, None, torch.float16, True, True, True),
    (128, 32, 8, 3, 300, 100, torch.bfloat16, True, False, True),
    (128, 96, 96, 2, 400, None, torch.float16, False, False, True),
    (64, 9, 3, 2, 777, None, torch.float16, True, False, True),
    (80, 4, 4, 1, 512, None, torch.bfloat16, False, False, True),
    (96, 28, 4, 4, 511, 40, torch.float16, True, True, True),
    (256, 16, 1, 2, 600, None, torch.float16, True, False, True),  # 16 query heads: two chunks of 8
    (72, 6, 2, 3, 300, 17, torch.float16, True, True, False),
    (8, 2, 2, 2, 30, None, torch.float16, True, False, True),
]
EMULATED = [
    (64, 6, 2, 2, 300, None, torch.float16, True, True, False),
    (128, 4, 4, 3, 100, 40, torch.float16, True, False, False),
    (72, 3, 1, 4, 70, 17, torch.float16, False, False, False),
]


@pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("head_size", [72, 128])
@pytest.mark.sample(2)
def test_attention_compiles(arch: str, head_size: int) -> None:
    plan = decode_attention.tile_config(1, 32, 8, head_size, 4096, processors=132)
    built = jit.compile(*decode_attention.attend_variant(plan, head_size, torch.float16, arch == "sm_90a"), arch)
    assert built.cubin


def test_plan_splits_until_half_of_the_device_is_busy() -> None:
    assert decode_attention.tile_config(1, 32, 32, 128, 4096, processors=132).splits == 2
    few, many = (
        decode_attention.tile_config(1, heads, heads, 128, 4096, processors=132, narrow=True) for heads in (32, 40)
    )
    assert (few.splits, few.warps) == (4, 4)  # on all of it, with half the warps each
    assert (many.splits, many.warps) == (2, 8)
    assert decode_attention.tile_config(4, 32, 32, 128, 4096, processors=132).splits == 1
    assert decode_attention.tile_config(1, 32, 8, 128, 4096, processors=132).splits == 8
    assert decode_attention.tile_config(1, 32, 32, 128, 16, processors=132).splits == 1  # nothing to share


def test_attention_says_what_it_does_not_take() -> None:
    assert decode_attention.supports(128, torch.float16) is None
    assert "not of 12" in str(decode_attention.supports(12, torch.float16))
    assert "float32" in str(decode_attention.supports(64, torch.float32))


def test_what_takes_two_launches_says_why() -> None:
    pages = KVPages.new(KVFormat.parse("kv16"), 2, 1, 64, torch.float16, "cpu")
    assert decode_attention.supports_pages(pages, torch.float16, 4096) is None
    assert "up to 16384" in str(decode_attention.supports_pages(pages, torch.float16, 131072))
    coded = KVPages.new(KVFormat.parse("kv4"), 2, 1, 64, torch.float16, "cpu")
    assert "kv4" in str(decode_attention.supports_pages(coded, torch.float16, 4096))


def paged(cache: Tensor, page: int = 16) -> tuple[KVPages, Tensor]:
    """Keys and values [2, B, Hkv, tokens, D] as pages in no order, and their table [B, max_pages]."""
    _, B, heads, tokens, D = cache.shape
    each, fmt = -(-tokens // page), KVFormat.parse(f"kv16:page={page}")
    pages = KVPages.new(fmt, B * each, heads, D, cache.dtype, cache.device)
    padded = torch.nn.functional.pad(cache, (0, 0, 0, each * page - tokens), value=float("nan"))
    order = torch.randperm(B * each, device=cache.device)
    pages.codes[order] = padded.unflatten(3, (each, page)).permute(1, 3, 0, 2, 4, 5).flatten(0, 1)
    return pages, order.view(B, each).int()


def contiguous(pages: KVPages, table: Tensor) -> Tensor:
    """The same back, [2, B, Hkv, max_pages * page, D]."""
    return pages.codes[table.long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


@gpu
@pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("turn", range(5))
def test_attention_matches_oracle(case: tuple[object, ...], turn: int) -> None:
    check_against_oracle(case, turn, "cuda")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("case", EMULATED, ids=str)
@pytest.mark.sample(3)
def test_emulated_attention_matches_oracle(
    case: tuple[object, ...], turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "load", EmulatedKernel)
    monkeypatch.setattr(decode_attention, "multiprocessors", lambda: 24)
    check_against_oracle(case, turn, "cpu")


EXTRAS = [  # channels that are rotated, scale, cap of the scores, sinks
    (16, None, None, False),
    (None, 1.0, 3.0, False),
    (None, 0.3, None, True),
    (24, 0.2, 5.0, True),
]


@gpu
@pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))
@pytest.mark.parametrize("extras", EXTRAS, ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c[0] >= 64 and c[7]], ids=str)
@pytest.mark.parametrize("turn", range(3))
def test_attention_with_extras_matches_oracle(case: tuple[object, ...], extras: tuple[object, ...], turn: int) -> None:
    check_against_oracle(case, turn, "cuda", *extras)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("extras", EXTRAS, ids=str)
@pytest.mark.parametrize("case", EMULATED[:2], ids=str)
@pytest.mark.sample(4)
def test_emulated_attention_with_extras_matches_oracle(
    case: tuple[object, ...], extras: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With split sequences, too: a sink counts once for all of them."""
    monkeypatch.setattr(decode_attention, "load", EmulatedKernel)
    monkeypatch.setattr(decode_attention, "multiprocessors", lambda: 24)
    for turn in range(2):
        check_against_oracle(case, turn, "cpu", *extras)


def check_against_oracle(
    case: tuple[object, ...],
    turn: int,
    dev: str,
    channels: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> None:
    D, heads, kv_heads, B, capacity, window, dtype, rotated, normed, cluster = case
    R, scale = channels or D, scale or D**-0.5
    torch.manual_seed(turn)
    nan, eps = float("nan"), 1e-6
    corners = [0, 1, 17, min(255, capacity - 2), capacity - 1, 15, 16, -1]
    at = [corners[(3 * turn + b) % len(corners)] for b in range(B)]
    position = torch.tensor(at, dtype=torch.int32, device=dev)
    qkv = torch.randn(B, (heads + 2 * kv_heads) * D, device=dev).to(dtype)
    cache = torch.randn(2, B, kv_heads, capacity, D, device=dev).to(dtype)
    for b in range(B):
        cache[:, b, :, max(at[b], 0) :] = nan  # must not be read
    angle = torch.arange(capacity, device=dev).float()[:, None] * 10000 ** (-torch.arange(0, R, 2, device=dev) / R)
    cos, sin = (angle.cos(), angle.sin()) if rotated else (None, None)
    sink = torch.randn(heads, device=dev) + 2 if sinks else None
    weights = [(1 + 0.2 * torch.randn(D, device=dev)).to(dtype) if normed else None for _ in range(2)]

    how = decode_attention.RopeNormArgs(cos, sin, AttendOptions(window, softcap, sink), *weights, eps)
    outs, caches = [], []
    for _ in range(3):
        (mine, table), out = (
            paged(cache, 16 + 16 * (turn % 2)),
            torch.full((B, heads * D), nan, dtype=dtype, device=dev),
        )
        if dev == "cuda":
            torch.cuda.synchronize()
        decode_attention.attend(qkv, mine, table, position, heads, scale, how, out, cluster=cluster)
        outs.append(out)
        caches.append(contiguous(mine, table))
    assert all(torch.equal(outs[0], again) for again in outs[1:])

    for b, p in enumerate(at):
        if p < 0:  # padding
            assert not bool(outs[0][b].any())
            assert caches[0][:, b].isnan().all()
            continue
        q, k, v = qkv[b].split([heads * D, kv_heads * D, kv_heads * D])
        q, k = q.view(heads, D).double(), k.view(kv_heads, D).double()
        if normed:
            q, k = _normed(q, weights[0], eps), _normed(k, weights[1], eps)
        if rotated:
            c, s = cos[p].double(), sin[p].double()
            q, k = (
                torch.cat([a * c - b * s, b * c + a * s, rest], -1)
                for a, b, rest in (x.split([R // 2, R // 2, D - R], -1) for x in (q, k))
            )
        keys, values = caches[0][:, b]
        assert _error(keys[:, p], k) < TOLERANCE[dtype]
        assert torch.equal(values[:, p], v.view(kv_heads, D))
        assert torch.equal(caches[0][:, b, :, :p], cache[:, b, :, :p])  # the rest is untouched
        assert caches[0][:, b, :, p + 1 :].isnan().all()
        first = 0 if window is None else max(0, p + 1 - window)
        seen = [x[:, first : p + 1].double().repeat_interleave(heads // kv_heads, 0) for x in (keys, values)]
        score = torch.einsum("hd,hsd->hs", q * scale, seen[0])
        score = score if softcap is None else softcap * torch.tanh(score / softcap)
        score = score if sink is None else torch.cat([score, sink.double()[:, None]], -1)
        share = score.softmax(-1)[:, : seen[0].shape[1]]
        assert _error(outs[0][b].view(heads, D), torch.einsum("hs,hsd->hd", share, seen[1])) < TOLERANCE[dtype]


@gpu
@pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))
@pytest.mark.parametrize("heads", [(32, 32), (32, 8), (4, 4)], ids=str)
@pytest.mark.parametrize("B", [1, 2, 3, 4])
@pytest.mark.parametrize("cluster", [True, False])
def test_heads_leave_as_the_digits_that_they_would_become(heads: tuple[int, int], B: int, cluster: bool) -> None:
    torch.manual_seed(B)
    (H, kv), dev, capacity = heads, "cuda", 700
    position = torch.tensor([0, 255, 699, 31][:B], dtype=torch.int32, device=dev)
    qkv = torch.randn(B, (H + 2 * kv) * 128, device=dev).half()
    pages, table = paged(torch.randn(2, B, kv, capacity, 128, device=dev).half())
    w = weight_layout.lay_out(random_weight(weight_layout.ScaleKind.BCQ, 3, 48, H * 128, 128, device=dev))
    config = decode_attention.tile_config(B, H, kv, 128, capacity, narrow=True)  # other splits sum in another order
    plain = decode_attention.attend(qkv, pages, table, position, H, 0.09, config=config, cluster=cluster)
    digits = decode_attention.attend_encode(qkv, pages, table, position, H, 0.09, config=config, cluster=cluster)
    wanted = bmma_gemv.product(bmma_gemv.encode(plain, w), w, torch.float32)
    assert torch.equal(bmma_gemv.product(digits, w, torch.float32), wanted)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())

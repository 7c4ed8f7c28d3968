"""paged_append.cu and paged_attention.cu on a CPU (emulated.py) against reference_attention.py."""

from dataclasses import replace

import pytest
import torch
from emulated import COMPILER, EmulatedKernel
from torch import Tensor

from crelle.formats.kv.pages import KVFormat, KVPages, hadamard
from crelle.kernels import reference_attention as kv
from crelle.kernels.cuda.attention import paged_attention
from crelle.kernels.cuda.attention.paged_attention import PagedTileConfig
from crelle.kernels.reference_attention import AttendOptions

HALF = torch.float16
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "load", EmulatedKernel)
    monkeypatch.setattr(paged_attention, "multiprocessors", lambda: 132)
    monkeypatch.setattr(paged_attention, "most_shared_memory", lambda: 227 * 1024)


def poisoned(fmt: KVFormat, count: int, heads: int, D: int) -> KVPages:
    made = KVPages.new(fmt, count, heads, D, HALF, "cpu")
    made.codes.view(torch.uint8).fill_(255)
    if made.words is not None:
        made.words.fill_(-1)  # scales that are not numbers
    return made


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def ints(*x: int) -> Tensor:
    return torch.tensor(x, dtype=torch.int32)


def attended(q: Tensor, pages: KVPages, table: Tensor, length: int) -> Tensor:
    """softmax(q K^T / sqrt(D)) V in f64 of what the pages hold: q [H, D] -> [H, D]."""
    fmt, (H, D) = pages.format, q.shape
    k, v = pages.read(table[: -(-length // fmt.page)].long())[:, :, :length].double()
    grouped = hadamard(q, fmt.key).double().view(pages.heads, -1, D)
    seen: Tensor = (grouped @ k.mT * D**-0.5).softmax(-1) @ v
    return hadamard(seen.view(H, D).float(), fmt.value).double()


CASES = [
    ("kv16", 64, 4),
    ("kv8", 64, 2),
    ("kv4", 64, 4),
    ("kv4", 128, 1),
    ("kv4:group=16,rotate=false", 80, 2),
    ("kv2", 64, 4),
    ("kv2", 128, 1),
    ("kv3", 64, 2),
    ("kv3", 128, 4),
    ("k4v2", 128, 4),
    ("k8v4", 128, 4),
    ("k2v3:group=16", 64, 2),
    ("k3v8:rotate=false", 128, 2),
    ("kv8:page=32", 64, 1),
    ("kv4:page=48", 128, 4),
]


@pytest.mark.parametrize(("text", "D", "group"), CASES)
@pytest.mark.sample(4)
def test_append_stores_the_bits_of_the_reference_and_attention_reads_them(text: str, D: int, group: int) -> None:
    fmt, heads, lengths = KVFormat.parse(text), 2, [70, 1, 33]
    table = torch.randperm(15, generator=torch.Generator().manual_seed(1)).int().view(3, 5)
    starts = [0, 70, 71, 104]
    k, v, center = random(104, heads, D), random(104, heads, D, seed=1), random(heads, D, seed=2).float()
    mine, theirs = (poisoned(fmt, 16, heads, D) for _ in range(2))
    off = center if fmt.key.coded else None
    kv.append(k, v, theirs, table, [0, 0, 0], starts=starts, center=off)
    paged_attention.append(k, v, mine, table, ints(0, 0, 0), starts=ints(*starts), center=off)
    for a, b in zip(mine.tensors(), theirs.tensors(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    q = random(3, heads * group, D, seed=3)
    for splits in (1, 3):
        usual = paged_attention.tile_config(fmt, 3, heads * group, heads, D, 80)
        config = PagedTileConfig(usual.group, usual.chunks, splits, 2, 2, 2, usual.occupancy)
        y = paged_attention.attend(q, mine, table, ints(*lengths), config=config, dtype=HALF)
        for b, n in enumerate(lengths):
            want = attended(q[b], mine, table[b], n)
            assert (y[b].double() - want).abs().max() <= 2e-3 * want.abs().max()


@pytest.mark.parametrize("text", ["kv16", "kv8", "kv4", "kv3", "kv2", "k4v2", "k8v3"])
@pytest.mark.sample(2)
def test_read_gives_what_the_pages_hold(text: str) -> None:
    fmt = KVFormat.parse(text)
    table = torch.randperm(10, generator=torch.Generator().manual_seed(1)).int().view(2, 5)
    k, v = random(75, 2, 64), random(75, 2, 64, seed=1)
    pages = poisoned(fmt, 10, 2, 64)
    kv.append(k, v, pages, table, [0, 0], starts=[0, 40, 75])
    found = paged_attention.read(pages, table, ints(0, 40, 75), 75)
    for b, (begin, end) in enumerate(((0, 40), (40, 75))):
        want = pages.read(table[b].long())[:, :, : end - begin].transpose(1, 2).half()
        assert torch.equal(found[:, begin:end], want)


@pytest.mark.parametrize("text", ["kv16", "kv8", "kv4", "kv3", "k4v2"])
@pytest.mark.sample(5)
def test_sums_of_a_long_context_lose_nothing_to_truncation(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores truncate sums: what all channels lose alike H gathers in one of them, sqrt(D) times as large."""
    monkeypatch.setattr(paged_attention, "load", lambda *what: EmulatedKernel(*what, truncates=True))
    fmt, n, D = KVFormat.parse(text), 8192, 128
    pages, table = KVPages.new(fmt, n // 16, 1, D, HALF, "cpu"), torch.arange(n // 16).int()[None]
    kv.append(random(n, 1, D), random(n, 1, D, seed=1), pages, table, [0])
    q = random(1, 4, D, seed=2)
    for splits in (1, 40):
        config = replace(paged_attention.tile_config(fmt, 1, 32, 8, D, n), splits=splits)
        y = paged_attention.attend(q, pages, table, ints(n), config=config, dtype=HALF)
        want = attended(q[0], pages, table[0], n)
        assert (y[0].double() - want).abs().max() <= 6e-4 * want.abs().max()


@pytest.mark.parametrize(("text", "heads", "warps"), [("kv4", 4, 16), ("kv4", 1, 16), ("kv16", 4, 12)])
@pytest.mark.sample(2)
def test_large_blocks_share_a_sequence(text: str, heads: int, warps: int) -> None:
    """Several threads add the parts of a channel, and some warps have no tokens."""
    fmt, n, D = KVFormat.parse(text), 1100, 128
    pages, table = KVPages.new(fmt, n // 16 + 1, 1, D, HALF, "cpu"), torch.arange(n // 16 + 1).int()[None]
    kv.append(random(n, 1, D), random(n, 1, D, seed=1), pages, table, [0])
    q = random(1, heads, D, seed=2)
    for length in (n, 40):
        rule = paged_attention.tile_config(fmt, 1, heads, 1, D, 1 << 20)
        y = paged_attention.attend(
            q, pages, table, ints(length), config=replace(rule, splits=5, warps=warps), dtype=HALF
        )
        want = attended(q[0], pages, table[0], length)
        assert (y[0].double() - want).abs().max() <= 1e-3 * want.abs().max()


def test_splits_beyond_the_tokens_count_for_nothing() -> None:
    fmt = KVFormat(4)
    pages, table = KVPages.new(fmt, 8, 1, 64, HALF, "cpu"), torch.arange(8).int()[None]
    kv.append(random(100, 1, 64), random(100, 1, 64, seed=1), pages, table, [0])
    q = random(1, 2, 64, seed=2)
    config = replace(paged_attention.tile_config(fmt, 1, 2, 1, 64, 128), splits=paged_attention.MOST_SPLITS)
    y = [paged_attention.attend(q, pages, table, ints(100), config=config, dtype=HALF) for _ in range(2)]
    want = attended(q[0], pages, table[0], 100)
    assert torch.equal(*y)
    assert (y[0][0].double() - want).abs().max() <= 2e-3 * want.abs().max()


@pytest.mark.parametrize("text", ["kv4", "kv3", "k4v2"])
@pytest.mark.sample(2)
def test_windows_and_padding(text: str) -> None:
    fmt, lengths = KVFormat.parse(text), [100, 0, 40]
    pages, table = poisoned(fmt, 24, 2, 64), torch.randperm(24, generator=torch.Generator().manual_seed(0)).int()
    table = table.view(3, 8)
    kv.append(random(140, 2, 64), random(140, 2, 64, seed=1), pages, table, [0, 0, 0], starts=[0, 100, 100, 140])
    q = random(3, 4, 64, seed=2)
    for window in (20, 64):
        y = paged_attention.attend(q, pages, table, ints(*lengths), how=AttendOptions(window), dtype=HALF)
        assert not y[1].any()
        for b in (0, 2):
            want = kv.attend(q[b : b + 1].float(), pages, table[b : b + 1], [lengths[b]], window=window)[0]
            assert (y[b].float() - want).abs().max() <= 2e-3 * want.abs().max()


EXTRAS = [("kv16", 64, 2), ("kv4", 64, 4), ("kv4", 128, 1), ("kv8", 64, 1), ("kv3", 128, 2), ("k4v2", 128, 8)]


@pytest.mark.parametrize(("text", "D", "group"), EXTRAS)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.sample(4)
def test_scales_caps_and_sinks(text: str, D: int, group: int, splits: int) -> None:
    """A sink is in the softmax once, whatever shares the sequence; padding stays 0."""
    fmt, heads, lengths = KVFormat.parse(text), 2, [70, 0, 33]
    pages, table = poisoned(fmt, 16, heads, D), torch.arange(15).int().view(3, 5)
    kv.append(3 * random(103, heads, D), random(103, heads, D, seed=1), pages, table, [0] * 3, starts=[0, 70, 70, 103])
    q, sinks = random(3, heads * group, D, seed=3), 2 + random(heads * group, seed=4).float()
    usual = paged_attention.tile_config(fmt, 3, heads * group, heads, D, 80)
    config = PagedTileConfig(usual.group, usual.chunks, splits, 2, 2, 2, usual.occupancy)
    for how in (AttendOptions(20, 2.0), AttendOptions(None, None, sinks), AttendOptions(None, 5.0, sinks)):
        y = paged_attention.attend(q, pages, table, ints(*lengths), how=how, scale=0.3, config=config, dtype=HALF)
        assert not y[1].any()
        for b in (0, 2):
            extra = {"window": how.window, "softcap": how.softcap, "sinks": how.sinks, "scale": 0.3}
            want = kv.attend(q[b : b + 1].float(), pages, table[b : b + 1], [lengths[b]], **extra)[0]
            assert (y[b].float() - want).abs().max() <= 3e-3 * want.abs().max()


@pytest.mark.parametrize("text", ["kv16", "kv4", "kv3", "k8v4"])
@pytest.mark.parametrize(("D", "R"), [(64, 16), (128, 96), (256, 64), (96, 24)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.sample(4)
def test_append_rotates_a_part_of_the_channels(text: str, D: int, R: int, normed: bool) -> None:
    fmt, H, Hkv, at = KVFormat.parse(text), 3, 2, [5, 17, -1]
    if reason := paged_attention.supports(fmt, D, HALF):
        pytest.skip(reason)
    mine, theirs = (poisoned(fmt, 6, Hkv, D) for _ in range(2))
    table, qkv = torch.arange(6).int().view(3, 2), random(3, H + 2 * Hkv, D)
    weight = (1 + 0.2 * random(D, seed=5).float()).half() if normed else None
    angle = torch.arange(32).float()[:, None] * 100 ** (-torch.arange(0, R, 2) / R)
    cos, sin = 1.2 * angle.cos(), 1.2 * angle.sin()  # yarn's factor is of what is rotated alone
    q, k, v = qkv.split([H, Hkv, Hkv], 1)
    options = {"q_norm": weight, "k_norm": weight, "eps": 1e-5}
    found = paged_attention.append(k, v, mine, table, ints(*at), q=q, cos=cos, sin=sin, **options)
    assert found is not None

    def prepared(x: Tensor) -> Tensor:
        if weight is not None:
            x = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).half() * weight
        a, b, rest = x[:2].float().split([R // 2, R // 2, D - R], -1)
        c, s = cos[at[:2], None], sin[at[:2], None]
        return torch.cat([a * c - b * s, b * c + a * s, rest], -1).half()

    kv.append(prepared(k), v[:2], theirs, table[:2], at[:2])
    if not normed:  # the order of a norm's sums is not torch's
        for a, b in zip(mine.tensors(), theirs.tensors(), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    want = hadamard(prepared(q), fmt)
    assert (found[:2].float() - want).abs().max() <= 2e-3 * want.abs().max()

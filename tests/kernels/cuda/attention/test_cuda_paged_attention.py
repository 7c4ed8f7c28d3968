"""Pages on a GPU against reference_attention.py: what is stored bit for bit, what is read against its sums in f32.

Without a GPU: the walk of paged_attention.cu through 16 tokens of codes, step by step in Python, gives the numbers that
formats/kv/pages.py says they are. `_Tile` says in Python what kv_fragments.cuh says in CUDA.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from plane_weights import random_weight
from torch import Tensor

from crelle.formats.kv.pages import KVFormat, KVPages, dequantize, hadamard, quantize
from crelle.kernels import cuda
from crelle.kernels import reference_attention as kv
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.attention import paged_attention
from crelle.kernels.cuda.planes import gemm
from crelle.kernels.cuda.planes.weight_layout import ScaleKind, lay_out
from crelle.kernels.reference_attention import AttendOptions

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))
HALF, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {HALF: 2e-3, BF16: 1e-2}
SIZES = (48, 64, 80, 96, 128)
FORMATS = ("kv16", "kv8", "kv4", "kv4:group=64", "kv4:group=16,rotate=false", "kv8:page=32", "kv4:center=false")
FEW_BITS = ("kv3", "kv2", "k4v2", "k8v4", "k2v3:group=16")  # heads of 64 and 128

STORED = [(fmt, D) for fmt in FORMATS for D in SIZES] + [(fmt, D) for fmt in FEW_BITS for D in (64, 128)]
# --- the walk, on a CPU -----------------------------------------------------------------------------------------------


@dataclass
class _Tile:
    """16 tokens of codes [16, D*bits/8] in pieces of 16 bytes, as `Pages` in kv_fragments.cuh has them."""

    bits: int
    codes: Tensor

    @property
    def units(self) -> int:
        return -(-self.codes.shape[1] // 16)

    def place(self, unit: int, token: int) -> int:
        even, piece = self.units & -self.units, token * self.units + unit
        line = piece // 8
        return line * 128 + (piece ^ (line % even if even <= 8 else line // (even // 8) % 8)) % 8 * 16

    def copied(self) -> list[int]:
        """Shared memory after the copies of `ask_tile`; what no copy wrote is 255."""
        row, memory = self.codes.shape[1], [255] * (self.units * 256)
        piece = 8 if row % 16 else 16
        flat = self.codes.flatten().tolist()
        for p in range(16 * row // piece):
            token, at = p // (row // piece), p % (row // piece) * piece
            to = self.place(at // 16, token) + at % 16
            memory[to : to + piece] = flat[p * piece : (p + 1) * piece]
        return memory

    def words(self, unit: int, lane: int, high: int, transposed: bool) -> int:
        """What ldmatrix gives a lane of tokens 0-7 or 8-15 of a column."""
        g, t, memory = lane // 4, lane % 4, self.copied()
        at = [(2 * t, g), (2 * t + 1, g)] if transposed else [(g, 2 * t), (g, 2 * t + 1)]  # token, number of 16 bits
        bytes_ = [memory[self.place(unit, 8 * high + token) + 2 * i + b] for token, i in at for b in range(2)]
        return int.from_bytes(bytes(bytes_), "little")


def _halves(word: int) -> tuple[float, float]:
    low, high = torch.tensor([word], dtype=torch.int64).to(torch.int32).view(HALF).tolist()
    return low, high


def _masked(word: int, mask: int) -> tuple[float, float]:
    """Bits as subnormal numbers: how many times 2^-24 they are."""
    low, high = _halves(word & mask)
    return low * 2**24, high * 2**24


def _permuted(word: int, low: int, high: int) -> tuple[float, float]:
    b = word.to_bytes(4, "little")
    return _masked(int.from_bytes(bytes([b[low], 0, b[high], 0]), "little"), 0xFFFFFFFF)


def _keys(bits: int, word: int) -> dict[int, float]:
    """The codes of a lane's run of channels, from the registers that `keys` makes, the factor taken off."""
    if bits == 8:
        pairs = [_permuted(word, 0, 1), _permuted(word, 2, 3)]
        return {2 * k + h: pairs[k][h] for k in range(2) for h in range(2)}
    made = [_masked(word >> 8 * (k // 2), 0x00F000F0 if k % 2 else 0x000F000F) for k in range(4)]
    return {k + 4 * h: made[k][h] / (16 if k % 2 else 1) for k in range(4) for h in range(2)}


def _values(bits: int, word: int) -> list[tuple[float, float]]:
    """For each channel of a lane the codes of its two tokens, as `values` makes them, the factor taken off."""
    if bits == 8:
        return [_permuted(word, i, i + 2) for i in range(2)]
    made = [_masked(word >> 8 * (j // 2), 0x00F000F0 if j % 2 else 0x000F000F) for j in range(4)]
    return [(low / (16 if j % 2 else 1), high / (16 if j % 2 else 1)) for j, (low, high) in enumerate(made)]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("D", [48, 64, 80])
def test_fragments_hold_every_code_once(bits: int, D: int) -> None:
    torch.manual_seed(D + bits)
    codes, words = quantize(torch.randn(16, D), bits, 1)
    plain = dequantize(codes, torch.full_like(words, 0x3C00 << 1), bits)  # scale 1, zero 0
    tile, wide = _Tile(bits, codes), 128 // bits
    memory = tile.copied()
    tile.copied = lambda: memory  # type: ignore[method-assign]
    keys, values = torch.full((16, tile.units * wide), -1.0), torch.full((16, tile.units * wide), -1.0)
    for unit in range(tile.units):
        for lane in range(32):
            g, t = lane // 4, lane % 4
            for high in range(2):
                for j, code in _keys(bits, tile.words(unit, lane, high, False)).items():
                    keys[g + 8 * high, unit * wide + wide // 4 * t + j] = code
                for j, pair in enumerate(_values(bits, tile.words(unit, lane, high, True))):
                    for i in range(2):
                        values[2 * t + i + 8 * high, unit * wide + wide // 8 * g + j] = pair[i]
    assert torch.equal(keys[:, :D], plain)
    assert torch.equal(values[:, :D], plain)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("D", [*SIZES, 192, 256])
def test_no_two_lanes_meet_in_a_bank(bits: int, D: int) -> None:
    tile = _Tile(bits, torch.zeros(16, D * bits // 8, dtype=torch.uint8))
    every = [tile.place(u, r) for u in range(tile.units) for r in range(16)]
    assert sorted(every) == list(range(0, 256 * tile.units, 16))
    for read in range(0, len(every), 8):  # 8 tokens of a column
        assert len({p % 128 for p in every[read : read + 8]}) == 8
    written = [tile.place(u, r) for r in range(16) for u in range(tile.units)]
    for piece in range(0, len(written), 8):  # neighbours in memory stay in one line
        assert len({p // 128 for p in written[piece : piece + 8]}) == 1


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_units_of_a_power_of_two_lie_around_one_place(bits: int, D: int) -> None:
    tile = _Tile(bits, torch.zeros(16, D * bits // 8, dtype=torch.uint8))
    for token in range(16):
        for unit in range(0, tile.units, 2):
            for second in range(2):
                around = (tile.place(second, token) ^ unit % 8 * 16) + unit // 8 * 128
                assert around == tile.place(unit + second, token)


def test_columns_share_codes_among_as_many_heads_as_fit() -> None:
    assert paged_attention.most_heads(KVFormat(4), 128) == 8
    assert paged_attention.most_heads(KVFormat(4), 80) == 4  # groups of 40: the second 16 bytes meet two
    assert paged_attention.most_heads(KVFormat.parse("kv4:group=24"), 96) == 2
    assert paged_attention.most_heads(KVFormat.parse("kv4:group=8"), 64) == 2
    assert paged_attention.most_heads(KVFormat(16), 80) == 8


def test_plan_splits_until_the_device_is_busy() -> None:
    four = KVFormat(4)
    assert paged_attention.tile_config(four, 128, 32, 32, 128, 1024, processors=132).splits == 1
    for context, splits, warps in ((8192, 16, 8), (4096, 16, 8), (2048, 16, 4)):  # the largest blocks that fill it
        config = paged_attention.tile_config(four, 1, 32, 8, 128, context, processors=132)
        assert (config.splits, config.warps) == (splits, warps)
    assert paged_attention.tile_config(four, 1, 32, 8, 128, 128, processors=132).splits == 1  # nothing to share
    assert paged_attention.tile_config(four, 4, 64, 4, 80, 128, processors=132).chunks == 4


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize("context", [32768, 131072])
def test_few_long_sequences_fill_the_device_at_one_time(bits: int, batch: int, context: int) -> None:
    p = paged_attention.tile_config(KVFormat(bits), batch, 32, 8, 128, context, processors=132)
    blocks, fits = batch * 8 * p.splits, p.occupancy // p.warps * 132
    assert fits * 0.85 <= blocks <= fits
    assert p.splits <= paged_attention.MOST_SPLITS
    assert paged_attention.shared_bytes(p, KVFormat(bits), 128) <= 225 * 1024


def test_paged_says_what_it_does_not_take() -> None:
    assert paged_attention.supports(KVFormat(4), 128, HALF) is None
    assert "not of 72" in str(paged_attention.supports(KVFormat(4), 72, HALF))
    assert "multiple of 16 tokens" in str(paged_attention.supports(KVFormat(4, page=8), 64, HALF))
    assert "float32" in str(paged_attention.supports(KVFormat(16), 64, HALF, torch.float32))
    for text in ("kv3", "kv2", "k4v2", "k8v4:group=16", "4,layers.0=8,layers.5=k4v2", "16,layers.1=4"):
        assert paged_attention.supports(KVFormat.parse(text), 128, HALF) is None
    for text, said in (
        ("k16v4", "both codes or both of 16 bits"),
        ("4,layers.3=k8v16", "both codes or both of 16 bits"),
        ("k8v16,layers.3=4", "both codes or both of 16 bits"),
        ("k4v2:page=32", "in pages of 16 tokens"),
    ):
        assert said in str(paged_attention.supports(KVFormat.parse(text), 128, HALF))
    assert "in heads of 64, 128" in str(paged_attention.supports(KVFormat(3), 80, HALF))


@pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))
@pytest.mark.parametrize("arch", jit.ARCHITECTURES)
@pytest.mark.parametrize("fmt", ["kv16", "kv4", "kv3", "k4v2"])
@pytest.mark.sample(4)
def test_paged_kernels_compile(arch: str, fmt: str) -> None:
    form = KVFormat.parse(fmt)
    plan = paged_attention.tile_config(form, 128, 32, 32, 128, 1024, processors=132)
    assert jit.compile(*paged_attention.attend_variant(plan, form, 128, HALF, HALF), arch).cubin
    assert jit.compile(*paged_attention.append_variant(form, 128, HALF, HALF), arch).cubin


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def _poisoned(fmt: KVFormat, pages: int, heads: int, D: int, dtype: torch.dtype) -> KVPages:
    made = KVPages.new(fmt, pages, heads, D, dtype, "cpu")
    made.codes.fill_(255 if fmt.coded else torch.nan)
    if made.words is not None:
        made.words.fill_(-1)  # scales that are not numbers
    return made


def _on_device(pages: KVPages) -> KVPages:
    codes, words = pages.codes.cuda(), None if pages.words is None else pages.words.cuda()
    return replace(pages, codes=codes, words=words)


def _ints(x: object) -> Tensor:
    return torch.as_tensor(x, dtype=torch.int32).cuda()


def _filled(
    fmt: KVFormat, D: int, heads: int, dtype: torch.dtype, lengths: list[int]
) -> tuple[KVPages, KVPages, Tensor]:
    """Sequences appended by both; pages are in no order, and what was not written is poison."""
    B, wide = len(lengths), -(-max(lengths) // fmt.page) + 1
    wanted = _poisoned(fmt, B * wide + 3, heads, D, dtype)
    found = _on_device(wanted)
    table = torch.randperm(B * wide + 3)[: B * wide].view(B, wide).int()
    N, center = sum(lengths), torch.randn(heads, D) if fmt.center else None
    k, v = (torch.randn(N, heads, D).to(dtype) for _ in range(2))
    starts = [sum(lengths[:b]) for b in range(B + 1)]
    kv.append(k, v, wanted, table, [0] * B, starts=starts, center=center)
    paged_attention.append(
        k.cuda(),
        v.cuda(),
        found,
        table.cuda(),
        _ints([0] * B),
        starts=_ints(starts),
        center=None if center is None else center.cuda(),
    )
    return wanted, found, table


@gpu
@needs_gpu
@pytest.mark.parametrize(("fmt", "D"), STORED)
def test_append_stores_the_reference_bits(fmt: str, D: int) -> None:
    torch.manual_seed(D)
    for dtype in (HALF, BF16):
        wanted, found, _ = _filled(KVFormat.parse(fmt), D, 3, dtype, [1, 40, 17, 16])
        for a, b in zip(wanted.tensors(), found.tensors(), strict=True):
            assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))


@gpu
@needs_gpu
@pytest.mark.parametrize(("fmt", "D"), STORED)
def test_read_gives_the_stored_numbers(fmt: str, D: int) -> None:
    torch.manual_seed(D)
    form = KVFormat.parse(fmt)
    lengths = [1, 40, 17]
    wanted, found, table = _filled(form, D, 3, HALF, lengths)
    starts = [0, *accumulate(lengths)]
    together = (
        paged_attention.read(found, table.cuda(), _ints(starts), starts[-1]).cpu().transpose(1, 2)
    )  # [2, Hkv, total, D]
    for b, length in enumerate(lengths):
        used = table[b, : -(-length // form.page)].long()
        assert torch.equal(together[:, :, starts[b] : starts[b + 1]], wanted.read(used, HALF)[:, :, :length])


@gpu
@needs_gpu
@pytest.mark.parametrize("fmt", ["kv16", "kv4"])
@pytest.mark.parametrize("D", [80, 128])
def test_append_rotates_and_turns(fmt: str, D: int) -> None:
    torch.manual_seed(D)
    form, B, H, Hkv = KVFormat.parse(fmt), 3, 6, 2
    wanted = _poisoned(form, 20, Hkv, D, HALF)
    found = _on_device(wanted)
    table, at = torch.randperm(20)[:18].view(B, 6).int(), [0, 37, -1]  # the last is nobody
    qkv = torch.randn(B, H + 2 * Hkv, D).half()
    angle = torch.arange(64).float()[:, None] * 10000 ** (-torch.arange(0, D, 2) / D)
    cos, sin = angle.cos(), angle.sin()
    q, k, v = qkv.cuda().split([H, Hkv, Hkv], 1)
    q_out = paged_attention.append(k, v, found, table.cuda(), _ints(at), q=q, cos=cos.cuda(), sin=sin.cuda())
    assert q_out is not None

    def rotated(x: Tensor) -> Tensor:
        a, b = x[:2].float().chunk(2, -1)
        c, s = cos[at[:2], None], sin[at[:2], None]
        return torch.cat([a * c - b * s, b * c + a * s], -1).half()

    q, k, v = qkv.split([H, Hkv, Hkv], 1)
    kv.append(rotated(k), v[:2], wanted, table[:2], at[:2])
    for a, b in zip(wanted.tensors(), found.tensors(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))
    assert torch.equal(q_out[:2].cpu(), hadamard(rotated(q), form).half())


@gpu
@needs_gpu
def test_append_norms_before_it_turns() -> None:
    torch.manual_seed(0)
    form, weight = KVFormat(4), (1 + 0.2 * torch.randn(128)).half()
    pages, q = _on_device(_poisoned(form, 2, 1, 128, HALF)), torch.randn(5, 3, 128).half()
    q_out = paged_attention.append(None, None, pages, None, None, q=q.cuda(), q_norm=weight.cuda(), eps=1e-5)
    assert q_out is not None
    normed = q.double() * torch.rsqrt(q.double().pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    wanted = hadamard(normed.float(), form)
    assert float((q_out.cpu().float() - wanted).norm() / wanted.norm()) < TOLERANCE[HALF]


CASES = [  # head size, heads, key heads, lengths, window, thread blocks that share a sequence
    (128, 32, 32, [1, 16, 17, 1000], None, 1),
    (128, 32, 8, [33, 500, 0, 64], None, 4),
    (128, 16, 2, [300, 31], 40, 2),
    (128, 7, 1, [100, 2048], None, None),
    (64, 9, 3, [130, 15], 17, 1),
    (48, 6, 3, [70, 33], None, 2),
    (80, 8, 1, [100, 77], None, None),
    (96, 4, 4, [250, 1], 100, 3),
    (64, 2, 2, [9000, 5], None, None),  # a long average, of which little remains
]


@gpu
@needs_gpu
@pytest.mark.parametrize("fmt", [*FORMATS, *FEW_BITS])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_paged_attention_matches_oracle(fmt: str, dtype: torch.dtype, case: tuple[object, ...]) -> None:
    D, H, Hkv, lengths, window, splits = case
    assert isinstance(D, int) and isinstance(H, int) and isinstance(Hkv, int) and isinstance(lengths, list)  # noqa: PT018
    assert window is None or isinstance(window, int)
    torch.manual_seed(D)
    form = KVFormat.parse(fmt)
    if fmt in FEW_BITS and (reason := paged_attention.supports(form, D, dtype)):
        pytest.skip(reason)
    wanted, found, table = _filled(form, D, Hkv, dtype, lengths)
    q = torch.randn(len(lengths), H, D).to(dtype)
    config = paged_attention.tile_config(form, len(lengths), H, Hkv, D, max(lengths))
    config = replace(config, splits=splits) if isinstance(splits, int) else config
    args = (q.cuda(), found, table.cuda(), _ints(lengths))
    outs = []
    for _ in range(3):
        out = torch.full((len(lengths), H, D), torch.nan, dtype=dtype, device="cuda")
        torch.cuda.synchronize()
        outs.append(paged_attention.attend(*args, how=AttendOptions(window), config=config, out=out))
    assert all(torch.equal(outs[0], again) for again in outs[1:])
    for b, length in enumerate(lengths):
        y = outs[0][b].cpu()
        if length == 0:
            assert not y.any()
            continue
        oracle = kv.attend(q[b : b + 1].float(), wanted, table[b : b + 1], [length], window=window)[0]
        assert float((y.float() - oracle).norm() / oracle.norm()) < TOLERANCE[dtype]


@gpu
@needs_gpu
@pytest.mark.parametrize("fmt", ["kv16", "kv8", "kv4"])
@pytest.mark.parametrize(("H", "Hkv", "splits"), [(8, 2, 1), (4, 4, 2)])
def test_a_result_can_be_laid_out_for_the_next_product(fmt: str, H: int, Hkv: int, splits: int) -> None:
    torch.manual_seed(0)
    form, lengths = KVFormat.parse(fmt), [300, 20, 64, 1, 17, 0, 33, 128]
    _, found, table = _filled(form, 128, Hkv, HALF, lengths)
    config = replace(paged_attention.tile_config(form, 8, H, Hkv, 128, 320), splits=splits)
    args = (torch.randn(8, H, 128).half().cuda(), found, table.cuda(), _ints(lengths))
    for kind, planes in ((ScaleKind.BCQ, 2), (ScaleKind.UNIFORM, 4)):
        w = lay_out(random_weight(kind, planes, 16, H * 128, 128, device="cuda"))
        wanted = gemm.pack(paged_attention.attend(*args, config=config).view(8, -1), w).xs
        out = torch.full_like(wanted, torch.nan)
        assert torch.equal(paged_attention.attend(*args, config=config, packed_for=w, out=out), wanted)


@gpu
@needs_gpu
@pytest.mark.parametrize("fmt", ["kv8", "kv4"])
@pytest.mark.parametrize("heads", [1, 4])
def test_sums_over_long_texts_keep_their_digits(fmt: str, heads: int) -> None:
    torch.manual_seed(1)
    form, length = KVFormat.parse(fmt), 20_000
    wanted, found, table = _filled(form, 128, 1, HALF, [length])
    q = torch.randn(1, heads, 128).half()
    for splits in (1, 8):
        config = replace(paged_attention.tile_config(form, 1, heads, 1, 128, length), splits=splits)
        y = paged_attention.attend(q.cuda(), found, table.cuda(), _ints([length]), config=config)[0].cpu()
        oracle = kv.attend(q.float(), wanted, table, [length])[0]
        assert float((y.float() - oracle).norm() / oracle.norm()) < TOLERANCE[HALF]


@gpu
@needs_gpu
def test_a_sequence_is_the_same_in_any_batch() -> None:
    torch.manual_seed(0)
    form, lengths = KVFormat(4), [300, 20, 64]
    _, found, table = _filled(form, 128, 4, HALF, lengths)
    q, config = torch.randn(3, 8, 128).half().cuda(), paged_attention.tile_config(form, 3, 8, 4, 128, 320)
    together = paged_attention.attend(q, found, table.cuda(), _ints(lengths), config=config)
    for b in range(3):
        alone = paged_attention.attend(
            q[b : b + 1], found, table[b : b + 1].cuda(), _ints(lengths[b : b + 1]), config=config
        )
        assert torch.equal(together[b : b + 1], alone)

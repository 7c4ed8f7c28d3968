"""Attention over pages: of 16 bits as torch's own, of codes as of their numbers; any chunks, any batch, faults."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_cases import share_of
from torch import Tensor

from crelle.errors import CapacityError, SchemeError
from crelle.formats.kv.pages import KVFormat, KVPages, hadamard
from crelle.kernels.reference_attention import append, attend

quick = settings(deadline=None, max_examples=share_of(25))
TOLERANCE = 1e-5  # sums of f32 in another order
FORMATS = [
    *("kv16", "kv8", "kv4", "kv4:group=64", "kv4:rotate=false", "kv4:page=8"),
    *("kv3", "kv2", "k4v2", "k16v4", "k8v16", "k8v4:page=5"),
]
lengths_of = st.lists(st.integers(1, 70), min_size=1, max_size=4)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(
    fmt: KVFormat, lengths: list[int], heads: int = 2, head_size: int = 64, dtype: torch.dtype = torch.float32
) -> tuple[KVPages, Tensor]:
    """Pages full of what no one may read, and a table that hands them out in a mixed order."""
    need = [-(-n // fmt.page) for n in lengths]
    pages = KVPages.new(fmt, sum(need) + 3, heads, head_size, dtype, "cpu")
    for t in pages.tensors():
        t.fill_(float("nan") if t.is_floating_point() else 85)
    if pages.words is not None:
        pages.words.fill_(0x7E00 * 2 - 0x10000)  # the scale is not a number
    order = torch.randperm(sum(need) + 3, generator=torch.Generator().manual_seed(1)).int()
    table = torch.full((len(lengths), max(need) + 1), -1, dtype=torch.int32)
    for b, n in enumerate(need):
        table[b, :n] = order[sum(need[:b]) : sum(need[: b + 1])]
    return pages, table


def plain(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Torch's attention in f64 of the last T of S tokens: q [T, H, D], k and v [S, Hkv, D]."""
    T, S = q.shape[0], k.shape[0]
    query, key = torch.arange(S - T, S)[:, None], torch.arange(S)
    seen = key <= query if window is None else (key <= query) & (key > query - window)
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q[None], k[None], v[None], seen, enable_gqa=True)
    return y[0].transpose(0, 1).float()


def stored(pages: KVPages, row: Tensor, length: int) -> Tensor:
    """What the pages of a sequence stand for, turned back: [2, S, Hkv, D]."""
    n = -(-length // pages.format.page)
    k, v = pages.read(row[:n].long())[:, :, :length]
    return torch.stack([hadamard(k, pages.format.key), hadamard(v, pages.format.value)]).transpose(1, 2)


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize(("heads", "head_size"), [(4, 64), (2, 48), (1, 80), (1, 128)])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_attention_equals_plain_attention_over_what_the_pages_stand_for(
    text: str, heads: int, head_size: int, window: int | None
) -> None:
    fmt, S, T = KVFormat.parse(text), 300, 5
    pages, table = case(fmt, [S], heads, head_size)
    k, v, q = random(S, heads, head_size), random(S, heads, head_size, seed=1), random(T, 4, head_size, seed=2)
    append(k, v, pages, table, [0])
    kept_k, kept_v = stored(pages, table[0], S)
    for code, kept, x in ((fmt.key, kept_k, k), (fmt.value, kept_v, v)):
        assert code.coded or torch.equal(kept, x)
    y = attend(q, pages, table, [S], window=window)
    assert (y - plain(q, kept_k, kept_v, window)).abs().max() <= TOLERANCE
    assert (y - plain(q, k, v, window)).abs().max() <= {16: TOLERANCE, 8: 0.03, 4: 0.5, 3: 1.0, 2: 2.0}[
        min(fmt.bits, fmt.v_bits)
    ]


@quick
@pytest.mark.parametrize("text", FORMATS)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_any_chunks_store_the_bits_of_one_append(text: str, sizes: list[int]) -> None:
    fmt, S = KVFormat.parse(text), sum(sizes)
    k, v = random(S, 2, 64), random(S, 2, 64, seed=1)
    (whole, table), (parts, _) = case(fmt, [S]), case(fmt, [S])
    append(k, v, whole, table, [0])
    at = 0
    for size in sizes:
        append(k[at : at + size], v[at : at + size], parts, table, torch.tensor([at]))
        at += size
    for a, b in zip(whole.tensors(), parts.tensors(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@quick
@pytest.mark.parametrize("text", ["kv16", "kv8", "kv4", "kv3", "k4v2", "k16v2"])
@given(lengths=lengths_of, data=st.data())
def test_a_ragged_batch_gives_each_sequence_what_it_gets_alone_bit_for_bit(
    text: str, lengths: list[int], data: st.DataObject
) -> None:
    fmt = KVFormat.parse(text)
    new = [data.draw(st.integers(0, n), label="new") for n in lengths]  # tokens of a sequence that come in this call
    before = [n - m for n, m in zip(lengths, new, strict=True)]
    pages, table = case(fmt, lengths)
    k = [random(n, 2, 64, seed=2 * b) for b, n in enumerate(lengths)]
    v = [random(n, 2, 64, seed=2 * b + 1) for b, n in enumerate(lengths)]
    q = [random(m, 6, 64, seed=b + 50) for b, m in enumerate(new)]
    for many in (before, new):
        took = before if many is new else [0] * len(lengths)
        part = [slice(t, t + m) for t, m in zip(took, many, strict=True)]
        starts = [sum(many[:b]) for b in range(len(many) + 1)]
        flat_k, flat_v = (torch.cat([x[s] for x, s in zip(xs, part, strict=True)]) for xs in (k, v))
        append(flat_k, flat_v, pages, table, took, starts=starts)
    y = attend(torch.cat(q), pages, table, lengths, starts=torch.tensor(starts), window=33)
    for b, n in enumerate(lengths):
        alone, row = case(fmt, [n])
        append(k[b], v[b], alone, row, [0])
        if new[b]:
            mine = attend(q[b], alone, row, [n], window=33)
            assert torch.equal(y[starts[b] : starts[b + 1]], mine)


def test_equal_numbers_of_tokens_need_no_starts() -> None:
    fmt = KVFormat(4)
    pages, table = case(fmt, [9, 9])
    k, v, q = random(18, 2, 64), random(18, 2, 64, seed=1), random(4, 2, 64, seed=2)
    append(k, v, pages, table, [0, 0])
    y = attend(q, pages, table, [9, 9])
    for b in range(2):
        kept = stored(pages, table[b], 9)
        assert (y[2 * b : 2 * b + 2] - plain(q[2 * b : 2 * b + 2], *kept)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_pages_keep_their_dtype_and_q_its_own(dtype: torch.dtype) -> None:
    pages, table = case(KVFormat(16), [20], dtype=dtype)
    k, v, q = (random(20, 2, 64, seed=i).to(dtype) for i in range(3))
    append(k, v, pages, table, [0])
    y = attend(q, pages, table, [20])
    assert y.dtype == dtype
    assert torch.equal(stored(pages, table[0], 20)[0].to(dtype), k)
    assert (y.float() - plain(q, k, v)).abs().max() <= 2.0**-7


def test_a_centre_changes_no_result_but_the_rounding() -> None:
    """Keys around a far point: with the centre taken away, the same attention with a fraction of the error."""
    S, fmt = 80, KVFormat(4, center=True)
    far = 10 * random(2, 64, seed=9)
    k, v, q = random(S, 2, 64) + far, random(S, 2, 64, seed=1), random(S, 4, 64, seed=2)
    error = []
    for center in (None, far):
        pages, table = case(fmt, [S])
        append(k, v, pages, table, [0], center=center)
        kept_k, kept_v = stored(pages, table[0], S)
        back = kept_k if center is None else kept_k + center
        y = attend(q, pages, table, [S])
        assert (y - plain(q, back, kept_v)).abs().max() <= 10 * TOLERANCE
        error.append((back - k).pow(2).mean().item())
    assert error[1] < error[0] / 10


def test_rerun_is_bitwise_equal() -> None:
    fmt = KVFormat(4)
    k, v, q = random(50, 2, 64), random(50, 2, 64, seed=1), random(50, 4, 64, seed=2)
    results = []
    for _ in range(2):
        pages, table = case(fmt, [50])
        append(k, v, pages, table, [0])
        results.append(attend(q, pages, table, [50]))
    assert torch.equal(*results)


def test_what_does_not_fit_is_refused() -> None:
    pages, table = case(KVFormat(4), [20])
    k = random(4, 2, 64)
    with pytest.raises(CapacityError, match="token 50 needs page 3 of a table of 3 pages"):
        append(k, k, pages, table, [47])
    with pytest.raises(SchemeError, match="names page -1 of 5"):
        append(k, k, pages, table, [32])
    table[0, 0] = 5
    with pytest.raises(SchemeError, match="names page 5 of 5"):
        attend(k, pages, table, [4])
    with pytest.raises(SchemeError, match=r"must be \[4, 2, 64\], got \[4, 2, 32\]"):
        append(k[..., :32], k, pages, table, [0])
    with pytest.raises(SchemeError, match="3 heads of 64 cannot read pages of 2 heads of 64"):
        attend(random(1, 3, 64), pages, table, [4])
    with pytest.raises(SchemeError, match="has 3 tokens in all, but asks for 4 new ones"):
        attend(k, pages, table, [3])
    with pytest.raises(SchemeError, match="starts must rise from 0 to 4"):
        attend(k, pages, table, [4], starts=[0, 3])
    with pytest.raises(SchemeError, match="4 tokens are not the same number for each of 3 sequences"):
        append(k, k, pages, table.repeat(3, 1), [0, 0, 0])
    with pytest.raises(SchemeError, match="is for coded pages, not for kv16"):
        append(k, k, case(KVFormat(16), [20])[0], table, [0], center=k[0])


def test_sinks_take_weight_and_have_no_value() -> None:
    """Against f64 with a column of sinks, by a prompt and by its last token, over coded pages and over floats."""
    T, H, Hkv, D = 70, 4, 2, 32
    q, k, v = (random(T, heads, D, seed=i) for i, heads in enumerate((H, Hkv, Hkv)))
    sinks = 3 + random(H, seed=9)
    pages, table = KVPages.new(KVFormat.parse(16), 8, Hkv, D, torch.float32, torch.device("cpu")), torch.arange(8)[None]
    append(k, v, pages, table.int(), [0])
    wide = [x.double().repeat_interleave(H // x.shape[1], 1).transpose(0, 1) for x in (q, k, v)]  # [H, T, D]
    score = (wide[0] @ wide[1].mT * D**-0.5).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf)
    weight = torch.cat([score, sinks.double()[:, None, None].expand(H, T, 1)], -1).softmax(-1)
    expected = (weight[..., :-1] @ wide[2]).transpose(0, 1)
    assert (weight[..., -1] > 0.2).float().mean() > 0.2
    assert (attend(q, pages, table.int(), [T], sinks=sinks) - expected).abs().max() < 1e-5
    assert (attend(q[-1:], pages, table.int(), [T], sinks=sinks) - expected[-1:]).abs().max() < 1e-5

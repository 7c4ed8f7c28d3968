"""The ends of a decode step: rows of embeddings exactly as torch gathers them, the same tokens as torch.argmax."""

from types import SimpleNamespace

import pytest
import torch

from crelle.errors import CrelleError
from crelle.kernels import cuda
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.launch import load
from crelle.kernels.cuda.step import embed_argmax
from crelle.kernels.cuda.step.decode_step import Embed
from crelle.models.linear import QuantEmbedding
from crelle.quantizers.schemes.rtn import RTN

gpu = pytest.mark.gpu
needs_device = pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))
SIZES = [(1, 32000, 4096), (4, 50272, 72), (3, 77, 20), (2, 9000, 6152)]  # batch, vocabulary, width


@pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_tokens_compile(arch: str) -> None:
    kernels = [embed_argmax.embed_variant(torch.bfloat16), embed_argmax.greedy_variant(torch.float32)]
    assert all(built.cubin for built in jit.compile_all(kernels, arch))


@gpu
@needs_device
def test_an_empty_grid_is_refused_on_the_device() -> None:
    argmax, logits = embed_argmax.Argmax(1, torch.device("cuda")), torch.empty(0, 77, device="cuda")
    for _ in range(2):
        with pytest.raises(CrelleError, match=r"greedy<float>.*\(32, 0, 1\)"):
            load(*embed_argmax.greedy_variant(torch.float32))(
                (32, 0, 1), 256, logits, argmax.ids, argmax.made, argmax._best, argmax._arrived, 77
            )


@gpu
@needs_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("B", "V", "width"), SIZES)
def test_embed_equals_torch(B: int, V: int, width: int, dtype: torch.dtype) -> None:
    table, learned = torch.randn(V, width, device="cuda").to(dtype), torch.randn(60, width, device="cuda").to(dtype)
    ids = torch.randint(0, V, (B,), device="cuda")
    position = torch.randint(0, 50, (B,), device="cuda", dtype=torch.int32)
    assert torch.equal(embed_argmax.embed(ids, table), table[ids])
    wanted = table[ids] + learned[position.long() + 2]
    assert torch.equal(embed_argmax.embed(ids, table, position, learned), wanted)


@gpu
@needs_device
@pytest.mark.parametrize("width", [256, 20])
def test_padding_reads_nothing_before_the_learned_positions(width: int) -> None:
    """GPT-2's begin with the first row of their table, and a row of padding has position -1."""
    table, whole = torch.randn(77, width, device="cuda").half(), torch.randn(9, width, device="cuda").half()
    whole[0] = torch.nan
    ids, position = torch.tensor([3, 0], device="cuda"), torch.tensor([5, -1], device="cuda", dtype=torch.int32)
    learned = whole[1:]
    found = embed_argmax.embed(ids, table, position, learned, 0)
    assert torch.equal(found, table[ids] + learned[position.long().clamp(min=0)])


def test_padding_gets_the_first_learned_position_of_quantized_tables() -> None:
    spec = SimpleNamespace(learned_positions=0, embedding_scale=1)
    words, learned = (QuantEmbedding(RTN(bits=8, group=32).fit(torch.randn(n, 64)), torch.float32) for n in (77, 9))
    ids, position = torch.tensor([3, 0]), torch.tensor([5, -1], dtype=torch.int32)
    found = Embed(words, learned, spec)(ids, position)
    assert torch.equal(found, words(ids) + learned(torch.tensor([5, 0])))


@gpu
@needs_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("B", "V", "width"), SIZES)
def test_argmax_equals_torch(B: int, V: int, width: int, dtype: torch.dtype) -> None:
    argmax = embed_argmax.Argmax(B + 1, torch.device("cuda"))
    rows = torch.randn(4, B, V, device="cuda")
    rows[1] = rows[1].round()  # equals: the first counts
    rows[1, 0, :5], rows[1, 0, 5:] = -0.0, 0.0
    rows[2, B - 1, [11, 60]] = float("nan")
    rows[3, 0] = float("-inf")
    for i, logits in enumerate(rows.to(dtype)):
        wanted = logits.argmax(-1)
        made = argmax(logits)
        assert torch.equal(argmax.ids[:B], wanted)
        if i > 1:  # a row without a largest finite logit
            wanted[B - 1 if i == 2 else 0] = embed_argmax.NOT_FINITE
        assert torch.equal(made, wanted)


@gpu
@needs_device
def test_a_step_follows_tokens_that_only_the_device_knows() -> None:
    argmax, first = embed_argmax.Argmax(2, torch.device("cuda")), torch.zeros(2, dtype=torch.int64, device="cuda")
    table, head = (torch.randn(50, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    source = torch.tensor([1, 0], device="cuda")  # sequences change places
    argmax(embed_argmax.embed(first, table) @ head.T)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        argmax(embed_argmax.embed(first, table, source=source, sampled=argmax.ids) @ head.T)
    argmax(embed_argmax.embed(torch.tensor([3, 4], device="cuda"), table) @ head.T)
    wanted = (table[torch.tensor([3, 4], device="cuda")] @ head.T).argmax(-1)
    for _ in range(5):
        graph.replay()
        wanted = (table[wanted[source]] @ head.T).argmax(-1)
        assert torch.equal(argmax.made, wanted)


def test_nothing_to_sample_launches_nothing() -> None:
    argmax = embed_argmax.Argmax(4, torch.device("cpu"))
    assert argmax(torch.empty(0, 50)).shape == (0,)

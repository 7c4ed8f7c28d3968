"""Products with the chosen experts on a GPU: against f64, run again, in graphs, and with rows that are not finite."""

from collections.abc import Callable

import expert_cases
import pytest
import torch
from plane_weights import TOLERANCE, relative
from torch import Tensor

from crelle.kernels.cuda import jit
from crelle.kernels.cuda.experts import products
from crelle.kernels.cuda.launch import recording
from crelle.kernels.cuda.planes.weight_layout import ScaleKind

pytestmark = pytest.mark.gpu
HALF, BF16 = torch.float16, torch.bfloat16
KINDS = [
    (ScaleKind.UNIFORM, 4, 128, HALF),
    (ScaleKind.BCQ, 2, 128, BF16),
    (ScaleKind.BCQ, 3, 64, HALF),
    (ScaleKind.AFFINE, 4, 32, BF16),
    (ScaleKind.UNIFORM_SYMMETRIC, 4, 10**6, HALF),
    (ScaleKind.BCQ_SYMMETRIC, 8, 128, HALF),
]
# experts, of a token, width, inner: many and narrow, few and wide, odd sizes
SHAPES = {"narrow": (64, 8, 512, 192), "wide": (4, 2, 1024, 1408), "odd": (7, 3, 264, 40), "long": (8, 2, 512, 8448)}


def few(case: expert_cases.Case, x: Tensor, logits: Tensor) -> Tensor:
    return products.down(products.up(x, logits, case.experts), logits, case.experts)


def many(case: expert_cases.Case, x: Tensor, logits: Tensor, tokens: int = 8) -> Tensor:
    e = case.experts
    chosen, weights = products.route(logits, e)
    slots = products.sort(chosen, e, tokens)
    return products.combine(products.grouped_down(products.grouped_up(x, slots, e), slots, e), weights)


WAYS: dict[str, Callable[[expert_cases.Case, Tensor, Tensor], Tensor]] = {
    "gemv": few,
    **{f"gemm {n}": lambda c, x, logits, n=n: many(c, x, logits, n) for n in products.PASSES},  # type: ignore[misc]
}


CASES = [(*kind, shape) for i, kind in enumerate(KINDS) for shape in (SHAPES if i == 0 else ("narrow", "odd"))]


def case_of(kind: ScaleKind, P: int, group: int, dtype: torch.dtype, shape: str) -> expert_cases.Case:
    count, top, width, inner = SHAPES[shape]
    options = {"count": count, "top": top, "width": width, "inner": inner, "bias": P == 3, "device": "cuda"}
    return expert_cases.make(kind, P, group, dtype=dtype, normalize=P != 3, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile what these tests launch, on all cores."""
    with recording() as found:
        for kind in CASES:
            case = case_of(*kind)
            count, _, width, _ = SHAPES[kind[-1]]
            for way in WAYS.values():
                way(case, torch.zeros(1, width, device="cuda", dtype=kind[3]), torch.zeros(1, count, device="cuda"))
    jit.compile_all(sorted(found))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "P", "group", "dtype", "shape"), CASES)
def test_chosen_experts_match_oracle(
    kind: ScaleKind, P: int, group: int, dtype: torch.dtype, shape: str, way: str
) -> None:
    torch.manual_seed(P)
    count, top, width, _ = SHAPES[shape]
    case = case_of(kind, P, group, dtype, shape)
    for rows in (1, 3, 40):
        x = torch.randn(rows, width, device="cuda").to(dtype) / 4
        logits = torch.randn(rows, count + 1, device="cuda")
        poison = torch.full((1 << 22,), float("nan"), device="cuda")  # memory that the outputs then get
        del poison
        y = WAYS[way](case, x, logits)
        wanted = expert_cases.oracle(case, x, logits[:, :count], top, P != 3)
        assert relative(y, wanted) < 3 * TOLERANCE[dtype], rows
        assert all(torch.equal(WAYS[way](case, x, logits), y) for _ in range(20))


@pytest.mark.parametrize("way", [name for name in WAYS if name != "gemv"])
def test_a_token_has_the_same_bits_whatever_else_is_in_the_batch(way: str) -> None:
    case = expert_cases.make(ScaleKind.UNIFORM, 4, 128, count=16, top=4, width=512, inner=320, device="cuda")
    x, logits = torch.randn(100, 512, device="cuda", dtype=HALF), torch.randn(100, 16, device="cuda")
    whole = WAYS[way](case, x, logits)
    for some in (slice(0, 1), slice(3, 8), slice(20, 83)):
        assert torch.equal(WAYS[way](case, x[some].contiguous(), logits[some].contiguous()), whole[some])
    assert torch.equal(whole, many(case, x, logits, 16))


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_takes_other_experts_each_time(way: str) -> None:
    case = expert_cases.make(ScaleKind.UNIFORM, 4, 128, count=32, top=4, width=512, inner=256, device="cuda")
    x, logits = torch.randn(6, 512, device="cuda", dtype=HALF), torch.randn(6, 32, device="cuda")
    WAYS[way](case, x, logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = WAYS[way](case, x, logits)
    for _ in range(10):
        x.normal_()
        logits.normal_()
        wanted = WAYS[way](case, x, logits)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("broken", ["x", "logit"])
def test_rows_that_are_not_finite_stay_so_alone(way: str, broken: str) -> None:
    case = expert_cases.make(ScaleKind.UNIFORM, 4, 128, count=8, top=2, width=256, inner=128, device="cuda")
    x, logits = torch.randn(5, 256, device="cuda", dtype=HALF), torch.randn(5, 8, device="cuda")
    whole = WAYS[way](case, x, logits)
    if broken == "x":
        x[2, 7] = float("inf")
    else:
        logits[2, 3] = float("nan")
    y = WAYS[way](case, x, logits)
    assert not y[2].isfinite().any()
    kept = [0, 1, 3, 4]
    assert torch.equal(y[kept], whole[kept])


def test_weights_in_host_memory_are_read_through_the_table() -> None:
    """An expert's bytes may lie anywhere that the device can read."""
    case = expert_cases.make(ScaleKind.UNIFORM, 4, 128, count=4, top=2, width=256, inner=128, device="cuda")
    x, logits = torch.randn(3, 256, device="cuda", dtype=HALF), torch.randn(3, 4, device="cuda")
    wanted = [few(case, x, logits), many(case, x, logits)]
    pinned = []
    for e, expert in enumerate(case.laid_out):  # type: ignore[arg-type, var-annotated]
        for m, name in enumerate(("gate", "up", "down")):
            w = expert[name][0]
            for part, t in enumerate((w.words, w.scales)):
                pinned.append(t.cpu().pin_memory())
                case.experts.table[e, 3 * m + part] = pinned[-1].data_ptr()
                t.zero_()
    assert torch.equal(few(case, x, logits), wanted[0])
    assert torch.equal(many(case, x, logits), wanted[1])

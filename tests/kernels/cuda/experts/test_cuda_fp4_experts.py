"""Products with chosen experts of four-bit floats on a GPU: against f64, run again, in graphs, rows that are broken."""

from collections.abc import Callable

import expert_cases
import pytest
import torch
from fp4_weights import FORMATS
from plane_weights import relative
from torch import Tensor

from crelle.kernels.cuda import jit
from crelle.kernels.cuda.experts import fp4_products, products
from crelle.kernels.cuda.launch import recording

pytestmark = pytest.mark.gpu
HALF, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {HALF: 1e-3, BF16: 6e-3}
# experts, of a token, width, inner: with blocks that are mostly padding, odd, many and narrow, few and wide
SHAPES = {"padded": (8, 4, 2880, 720), "odd": (7, 3, 264, 40), "narrow": (128, 8, 512, 192), "wide": (4, 2, 1024, 2880)}
CASES = [(kind, dtype, shape) for kind in FORMATS for dtype in (HALF, BF16) for shape in ("padded", "odd")]
CASES += [("mxfp4", BF16, "narrow"), ("mxfp4", HALF, "wide")]


def few(case: expert_cases.Case, x: Tensor, logits: Tensor) -> Tensor:
    return fp4_products.down(fp4_products.up(x, logits, case.experts), logits, case.experts)


def many(case: expert_cases.Case, x: Tensor, logits: Tensor, tokens: int = 8) -> Tensor:
    e = case.experts
    weights, slots = expert_cases.sorted_slots(logits, e, tokens)
    made = fp4_products.grouped_down(fp4_products.grouped_up(x, slots, e), slots, e)
    return products.combine(made, weights)


WAYS: dict[str, Callable[[expert_cases.Case, Tensor, Tensor], Tensor]] = {
    "gemv": few,
    **{f"gemm {n}": lambda c, x, logits, n=n: many(c, x, logits, n) for n in products.PASSES},  # type: ignore[misc]
}


def case_of(kind: str, dtype: torch.dtype, shape: str) -> expert_cases.Case:
    count, top, width, inner = SHAPES[shape]
    return expert_cases.make_fp4(kind, count=count, top=top, width=width, inner=inner, dtype=dtype, device="cuda")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile what these tests launch, on all cores."""
    with recording() as found:
        for kind, dtype, shape in CASES:
            case, (count, _, width, _) = case_of(kind, dtype, shape), SHAPES[shape]
            for way in WAYS.values():
                way(case, torch.zeros(1, width, device="cuda", dtype=dtype), torch.zeros(1, count, device="cuda"))
    jit.compile_all(sorted(found))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "dtype", "shape"), CASES)
def test_chosen_experts_match_oracle(kind: str, dtype: torch.dtype, shape: str, way: str) -> None:
    torch.manual_seed(0)
    count, top, width, _ = SHAPES[shape]
    case = case_of(kind, dtype, shape)
    for rows in (1, 3, 40):
        x = torch.randn(rows, width, device="cuda").to(dtype)
        logits = torch.randn(rows, count + 1, device="cuda")
        poison = torch.full((1 << 22,), float("nan"), device="cuda")  # memory that the outputs then get
        del poison
        y = WAYS[way](case, x, logits)
        wanted = expert_cases.oracle(case, x, logits[:, :count], top, True, "swigluoai")
        assert relative(y, wanted) < TOLERANCE[dtype], rows
        assert all(torch.equal(WAYS[way](case, x, logits), y) for _ in range(20))


def test_a_token_has_the_same_bits_whatever_else_is_in_the_batch() -> None:
    case = case_of("mxfp4", BF16, "padded")
    x, logits = torch.randn(100, 2880, device="cuda", dtype=BF16), torch.randn(100, 8, device="cuda")
    whole = many(case, x, logits, 16)
    for some in (slice(0, 1), slice(3, 8), slice(20, 83)):
        assert torch.equal(many(case, x[some].contiguous(), logits[some].contiguous(), 16), whole[some])
    assert torch.equal(whole, many(case, x, logits, 8))
    assert torch.equal(whole, many(case, x, logits, 32))


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_takes_other_experts_each_time(way: str) -> None:
    case = case_of("mxfp4", BF16, "padded")
    x, logits = torch.randn(6, 2880, device="cuda", dtype=BF16), torch.randn(6, 8, device="cuda")
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
    case = case_of("mxfp4", HALF, "odd")
    x, logits = torch.randn(5, 264, device="cuda", dtype=HALF), torch.randn(5, 7, device="cuda")
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
    case = case_of("mxfp4", HALF, "odd")
    x, logits = torch.randn(3, 264, device="cuda", dtype=HALF), torch.randn(3, 7, device="cuda")
    wanted = [few(case, x, logits), many(case, x, logits)]
    pinned = []
    for e, expert in enumerate(case.laid_out):  # type: ignore[arg-type, var-annotated]
        for m, name in enumerate(("gate", "up", "down")):
            weight = expert[name][0].data
            pinned.append(weight.cpu().pin_memory())
            case.experts.table[e, 3 * m] = pinned[-1].data_ptr()
            weight.zero_()
    assert torch.equal(few(case, x, logits), wanted[0])
    assert torch.equal(many(case, x, logits), wanted[1])

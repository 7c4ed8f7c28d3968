"""What the vLLM plugin does without vLLM: matrices that come in parts, shares of ranks, products of a layer."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

from crelle.errors import FormatError, SchemeError, UnsupportedError
from crelle.formats.base import QuantTensor, format_of
from crelle.integrations.vllm import arrival as arrival_module
from crelle.integrations.vllm.arrival import Arrival, Share, arrival, fused_shares
from crelle.integrations.vllm.product import Experts, Product, Settings, Table, handle_of, log_kernels
from crelle.kernels import cpu

BCQ = {"format": "bcq", "bits": 3, "group": 32, "bias": True}
UNIFORM = {"format": "uniform", "bits": 4, "group": 32, "symmetric": False}
NESTED = {"format": "nested", "bits": 4, "group": 32, "precisions": [2, 4]}
DENSE = {"format": "dense"}


def random(kind: Mapping[str, Any], N: int = 64, K: int = 128, seed: int = 0) -> QuantTensor:
    spec = {**kind, "shape": [N, K]}
    return format_of(spec).random(spec, torch.Generator().manual_seed(seed))


def handed_over(a: Arrival, w: QuantTensor) -> Arrival:
    for part, tensor in w.tensors().items():
        a.put(part, tensor)
    return a


def test_ranks_hold_the_whole_together() -> None:
    w = random(UNIFORM)
    rows = [handed_over(arrival("m", w.spec(), 32, 128, r, 2, None), w).require()[0] for r in range(2)]
    assert torch.equal(torch.cat([p.dequantize() for p in rows]), w.dequantize())
    inputs = [handed_over(arrival("m", w.spec(), 64, 64, r, 2, None), w).require()[0] for r in range(2)]
    assert torch.equal(torch.cat([p.dequantize() for p in inputs], 1), w.dequantize())


def test_inputs_that_cannot_be_split_are_gathered(caplog: pytest.LogCaptureFixture) -> None:
    """Groups of 32 inputs do not lie within shares of 16: each of 8 ranks has 8 of 64 rows."""
    arrival_module._said.clear()
    w = random(UNIFORM)
    with caplog.at_level("INFO", "vllm.crelle"):
        parts = [handed_over(arrival("m", w.spec(), 64, 16, r, 8, None), w) for r in range(8)]
    assert torch.equal(torch.cat([p.require()[0].dequantize() for p in parts]), w.dequantize())
    assert [p.gathered and p.gathered.rows.start for p in parts] == list(range(0, 64, 8))
    assert caplog.messages == [
        "inputs cannot be split over ranks (that would split a group of 32 inputs): ranks gather them, and split the "
        "rows instead"
    ]


def test_neighbours_share_key_heads() -> None:
    """Two heads of keys on four ranks: two ranks hold the same."""
    assert [Share.of((64, 128), 32, 128, r, 4).rows.start for r in range(4)] == [0, 0, 32, 32]


def test_a_matrix_that_is_stored_fused_is_cut_part_by_part() -> None:
    w = random(BCQ, N=96)  # q 64, k 16, v 16
    whole, found = w.dequantize(), []
    for rank in range(2):
        a = Arrival("qkv", w.spec(), fused_shares(w.shape, [32, 8, 8], 128, rank, 2))
        found.append([p.dequantize() for p in handed_over(a, w).require()])
    for i, (begin, end) in enumerate(((0, 64), (64, 80), (80, 96))):
        assert torch.equal(torch.cat([found[0][i], found[1][i]]), whole[begin:end])


def test_a_share_has_tensors_of_its_own() -> None:
    w = random(BCQ)
    part = handed_over(arrival("m", w.spec(), 32, 128, 0, 2, None), w).require()[0]
    held = [t.untyped_storage().nbytes() for t in part.tensors().values()]
    assert held == [t.nbytes for t in part.tensors().values()]


def test_nested_planes_come_at_the_chosen_precision() -> None:
    w = random(NESTED)
    found = handed_over(arrival("m", w.spec(), 64, 128, 0, 1, 2), w).require()[0]
    assert found.bits == 2
    with pytest.raises(UnsupportedError, match="'m': this checkpoint supports 2, 4 bits, not 3"):
        handed_over(arrival("m", w.spec(), 64, 128, 0, 1, 3), w)


def test_refusals_name_the_matrix() -> None:
    w = random(UNIFORM)
    few = random(UNIFORM, N=4)
    with pytest.raises(UnsupportedError, match=r"'o_proj': 8 ranks cannot share 4 rows, nor the inputs: .*a group"):
        handed_over(arrival("o_proj", few.spec(), 4, 16, 0, 8, None), few)
    with pytest.raises(
        UnsupportedError, match="'o_proj': a matrix of 64 x 128 cannot be shared by 2 ranks of 48 x 128"
    ):
        arrival("o_proj", w.spec(), 48, 128, 0, 2, None)
    some = arrival("o_proj", w.spec(), 64, 128, 0, 1, None)
    some.put("planes", w.tensors()["planes"])
    with pytest.raises(FormatError, match="'o_proj': the checkpoint has no tensor 'scale'"):
        some.require()


@pytest.mark.parametrize("kinds", [[BCQ], [UNIFORM] * 3, [BCQ, UNIFORM, DENSE]], ids=["one", "stacked", "apart"])
def test_a_product_is_that_of_the_matrices_side_by_side(kinds: list[Any]) -> None:
    weights = [random(kind, N, seed=i) for i, (kind, N) in enumerate(zip(kinds, (64, 16, 16), strict=False))]
    product = Product(weights, torch.float32)
    assert len(product.prepared) == (3 if kinds[-1] is DENSE else 1)
    x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(1))
    found = torch.ops.crelle.layer(x, handle_of(product), product.N)
    expected = torch.cat([x @ w.dequantize().T for w in weights], -1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_ops_trace_without_knowing_their_layer() -> None:
    """A compiled graph holds the handle as an input: one graph serves all layers of a shape."""
    products = [Product([random(BCQ, seed=seed)], torch.float32) for seed in (1, 2)]
    compiled = torch.compile(lambda x, h: torch.ops.crelle.layer(x, h, 64) + 1, backend="eager", fullgraph=True)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    for product in products:
        assert torch.equal(compiled(x, handle_of(product)), product(x) + 1)


@pytest.mark.parametrize("kind", [UNIFORM, BCQ, NESTED, DENSE], ids=lambda kind: kind["format"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_table_looks_up_rows(kind: Mapping[str, Any], tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    w = random(kind)
    monkeypatch.setattr(torch, "empty", partial(torch.empty, dtype=torch.bfloat16))  # vLLM loads with this default
    table = Table(w, Product([w], torch.bfloat16) if tied else None)
    for tokens in (torch.tensor([[3, 3], [0, 63]]), torch.tensor([5], dtype=torch.int32)):
        found = torch.ops.crelle.lookup(tokens, handle_of(table), 128, torch.float32)
        torch.testing.assert_close(found, w.dequantize()[tokens.long()], rtol=1e-6, atol=1e-7)


def test_a_tied_table_keeps_no_copy() -> None:
    w = random(UNIFORM)
    product = Product([w], torch.bfloat16)
    table = Table(w, product)
    assert table.weight is None
    assert table.prepared is product.prepared[0]


def test_kernels_are_logged_once_for_all_layers_that_agree(caplog: pytest.LogCaptureFixture) -> None:
    arrival_module._said.clear()
    with caplog.at_level("INFO", "vllm.crelle"):
        for i in range(3):
            names = [f"model.layers.{i}.self_attn.{n}_proj" for n in "qkv"]
            log_kernels(names, Product([random(UNIFORM)] * 2 + [random(DENSE)], torch.float32))
    assert caplog.messages == [
        "q_proj, k_proj, v_proj: uniform, 4 bits, by Crelle's kernel 'cpu'",
        "q_proj, k_proj, v_proj: dense, 16 bits, by Crelle's kernel 'dense'",
    ]


def test_a_layer_that_is_gone_is_said_to_be() -> None:
    handle = handle_of(Table(random(UNIFORM)))
    with pytest.raises(UnsupportedError, match="is gone"):
        torch.ops.crelle.lookup(torch.tensor([0]), handle, 128, torch.float32)


@pytest.mark.parametrize("weigh_input", [False, True])
def test_experts_are_a_weighted_sum(weigh_input: bool) -> None:
    pairs = [([random(BCQ, 32, seed=e), random(UNIFORM, 32, seed=e)], random(BCQ, 128, 32, seed=e)) for e in range(3)]
    made = [(Product(into, torch.float32), Product([out], torch.float32)) for into, out in pairs]

    def activate(h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(h[:, :32]) * h[:, 32:]

    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
    ids, weights = torch.tensor([[0, 1], [1, 0], [-1, 0], [1, 1]]), torch.rand(4, 2)  # -1: another rank's
    experts = Experts(made, activate, weigh_input)
    found = torch.ops.crelle.experts(x, weights, ids, handle_of(experts))
    expected = torch.zeros(4, 128)
    for m in range(4):
        for e, weight in zip(ids[m].tolist(), weights[m], strict=True):
            if e >= 0:
                into, out = pairs[e]
                h = activate(
                    torch.cat([(x[m] * weight if weigh_input else x[m]) @ w.dequantize().T for w in into])[None]
                )
                expected[m] += (1 if weigh_input else weight) * (h @ out.dequantize().T)[0]
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def test_without_the_extension_nothing_is_dequantized_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available", lambda: "is not built here; reinstall crelle with a C++20 compiler")
    with pytest.raises(UnsupportedError, match=r"needs Crelle's C\+\+ kernels .* is not built here"):
        Product([random(BCQ)], torch.float32)
    assert Product([random(DENSE)], torch.float32).N == 64


def test_a_kernel_may_be_named() -> None:
    settings = Settings.of({"kernel": "cpu-int8"})
    product = Product([random(BCQ), random(DENSE)], torch.float32, settings.kernel)
    assert [p.kernel.name for p in product.prepared] == ["cpu-int8", "dense"]
    with pytest.raises(UnsupportedError, match="there is no kernel 'gpu'"):
        Product([random(BCQ)], torch.float32, "gpu")


@pytest.mark.parametrize("chosen", [{"bit": 2}, {"bits": "2"}, {"bits": True}, 2])
def test_settings_that_make_no_sense_are_refused(chosen: Any) -> None:
    with pytest.raises(SchemeError, match="'crelle' in the additional config has"):
        Settings.of(chosen)

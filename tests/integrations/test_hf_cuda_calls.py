"""Calls of quantized linears in transformers on a GPU: the host's time, captured graphs, a second GPU."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import quantized_copy
from hf_models import error, tokens, write_model
from torch import nn
from transformers import AutoModelForCausalLM

from crelle.integrations.transformers import CrelleLinear
from crelle.kernels import cuda

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
SCHEMES = (
    "rtn:bits=4,group=64",
    "bcq:bits=3,group=64,rounds=2",
    "mixed:four=0.25,outliers=0.002",
    "atom:w=4,a=4,group=64,outliers=64",
)
MOST = 8  # times the host's time of nn.Linear


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("calls") / "m", **SIZES)


def load(source: Path, to: Path, scheme: str, device: str = "cuda") -> Any:
    path = quantized_copy(source, to / "q", scheme)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16).to(device)


def linear_of(model: Any) -> CrelleLinear:
    return next(m for m in model.modules() if isinstance(m, CrelleLinear))


def host_time(call: Callable[[], Any], calls: int = 100) -> float:
    """The least time of a call without waiting for the GPU."""
    found = []
    for _ in range(10):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        found.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    return min(found)


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_host_needs_a_few_times_what_torch_needs(scheme: str, source: Path, tmp_path: Path) -> None:
    """A ratio in one process: a linear of one row against nn.Linear's."""
    layer = linear_of(load(source, tmp_path, scheme))
    plain = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=torch.float16, device="cuda")
    x = torch.randn(1, 1, layer.in_features, dtype=torch.float16, device="cuda")
    ratios = [host_time(lambda: layer(x)) / host_time(lambda: plain(x)) for _ in range(3)]
    assert min(ratios) < MOST


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_later_calls_give_the_bits_of_the_first(scheme: str, rows: int, source: Path, tmp_path: Path) -> None:
    """Whose launches are laid out anew; also on another stream and in a graph."""
    layer = linear_of(load(source, tmp_path, scheme))
    inputs = torch.randn(3, rows, layer.in_features, dtype=torch.float16, device="cuda")
    wanted = []
    for x in inputs:
        layer._made = None  # a weight without plans
        layer._held = None
        wanted.append(layer(x).clone())
    for x, y in zip(inputs, wanted, strict=True):
        assert torch.equal(layer(x), y)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(layer(inputs[1]), wanted[1])
    graph, x = torch.cuda.CUDAGraph(), inputs[0].clone()
    with torch.cuda.graph(graph):
        y = layer(x)
    for given, want in zip(inputs, wanted, strict=True):
        x.copy_(given)
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, want)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
def test_captured_by_the_compiler(scheme: str, source: Path, tmp_path: Path) -> None:
    """Compiled before any input was seen: weights are not allocated in the graph's memory; a replay reads its input."""
    model = load(source, tmp_path, scheme)
    compiled = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    given = [tokens(6).roll(i, 1).cuda() for i in range(5)]
    found = []
    for ids in given:
        torch.compiler.cudagraph_mark_step_begin()
        found.append(compiled(ids, use_cache=False).logits.float().cpu())
    for ids, logits in zip(given, found, strict=True):
        want = model(ids, use_cache=False).logits.float().cpu()
        assert error(logits, want) < (0.4 if "a=4" in scheme else 2e-2)


@pytest.mark.filterwarnings("ignore")
def test_generate_with_a_static_cache(source: Path, tmp_path: Path) -> None:
    """The steps are compiled and captured by transformers itself."""
    model = load(source, tmp_path, SCHEMES[0])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = tokens(8)[:1].cuda()
    plain = model.generate(ids, **options)
    for _ in range(2):
        found = model.generate(ids, cache_implementation="static", **options)
        assert found.shape == plain.shape
        assert torch.equal(found[:, :10], plain[:, :10])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_a_gpu_that_is_not_the_current_one(scheme: str, source: Path, tmp_path: Path) -> None:
    with torch.no_grad():
        here = load(source, tmp_path, scheme)(tokens().cuda()).logits.cpu()
        there = load(source, tmp_path, scheme, "cuda:1")(tokens().to("cuda:1")).logits.cpu()
    assert torch.equal(here, there)

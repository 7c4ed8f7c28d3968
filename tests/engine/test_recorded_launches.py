"""The engine over a GPU that only records launches: every format's requests end, and no launch has an empty grid.

Beside test_request_matrix.py, which has the numbers: here the CUDA executor's own prefill and decode steps run.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_gpu import pretend
from request_matrix import CASES, Case, batch, make_model, requests

from crelle import Sampling
from crelle.engine import model_runner
from crelle.formats.kv.pages import KVFormat
from crelle.kernels.cuda import launch
from crelle.kernels.cuda.executor import CudaExecutor, supports
from crelle.kernels.cuda.step.fuse import STEPPED
from crelle.models.loader import Model

SMALL = [  # attention kernels do not take k16v8
    case for case in CASES if case.budget < 512 and case.kv != "k16v8"
]


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["default", "invariant"])
@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.sample(5)
def test_no_request_launches_an_empty_grid(
    case: Case, batch_invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)

    def make(model: Model, layers: Any, kv: KVFormat, *, batch_invariant: bool) -> CudaExecutor:
        assert supports(model.spec, kv, model.dtype) is None
        assert {linear.kernel for linear in model.linears()} <= STEPPED
        return CudaExecutor(model, layers, [None] * len(layers), batch_invariant=batch_invariant)

    monkeypatch.setattr(model_runner, "make_executor", make)
    llm = make_model(case.scheme, "recorded", tmp_path)
    sampling = Sampling(max_tokens=12)  # logits hold anything: there is nothing to sample from
    asked = [replace(one, answer=max(1, one.answer), sampling=sampling) for one in requests(case, eager=True)]
    with launch.recording() as kernels, torch.inference_mode():
        engine, _ = batch(llm, case, asked, frozenset(), batch_invariant=batch_invariant)
    assert any(step.startswith("crelle::greedy") for _, step in kernels)
    assert engine.stats.tokens_run > case.budget

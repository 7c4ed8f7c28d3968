"""bench gemm as far as it goes without a GPU: the oracle of quantized activations, the plot, refusals."""

import json
from pathlib import Path

import pytest
import torch
from in_process import run

from crelle.bench.kernels import gemv_cuda
from crelle.bench.kernels.random_matrices import random_generator, random_matrix
from crelle.kernels import ops
from crelle.quantizers.scheme import parse


@pytest.mark.parametrize("levels", [1, 2])
def test_the_oracle_rounds_x_as_the_scheme_does(levels: int) -> None:
    w = random_matrix(parse(f"atom:w=4,a=4,group=32,outliers=32,levels={levels}"), 48, 160, random_generator(0, "cpu"))
    made = ops.prepare(w, torch.float32, "integer-reference")
    norm, _ = gemv_cuda.check(w, made, 3, torch.float32, random_generator(1, "cpu"))
    assert norm < 1e-6
    x = torch.randn(3, 160)
    plain = x.double() @ w.dequantize(torch.float64).T
    assert (gemv_cuda.exact(x, w) - plain).norm() > 0.01 * plain.norm()  # 4-bit activations do differ


def row(scheme: str, rows: int, us: float) -> dict[str, object]:
    return {
        "scheme": scheme,
        "shape": [64, 64],
        "rows": rows,
        "device": "a GPU",
        "tflops": 1.0,
        "speedup": 10 / us,
        "baseline": "cuBLAS",
        "baseline_microseconds": 10.0,
        "peers": {"int8": 8.0},
    }


def test_rows_of_gemm_are_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "gemm.json"
    file.write_text(json.dumps({"rows": [row(s, m, 5.0) for s in ("a", "b") for m in (16, 64)]}))
    assert run("bench", "plot", str(file)).code == 0
    assert (tmp_path / "gemm.png").stat().st_size > 1000


@pytest.mark.parametrize("rows", ["", "0", "16,,64", "-1", "many"])
def test_wrong_rows_get_a_sentence(rows: str) -> None:
    done = run("bench", "gemm", "--rows", rows)
    assert done.code == 2
    assert "--rows must look like" in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_run() -> None:
    done = run("bench", "gemm")
    assert done.code == 2
    assert "bench gemv --batch" in done.err

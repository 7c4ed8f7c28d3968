"""A small product on every instruction set, with numpy only: for valgrind and the like, which cannot bear torch.

python tests/kernels/small_case.py CORE.so   prints `ok` when every product is right.
"""

import importlib.util
import sys
from typing import Any

import numpy as np


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("crelle.kernels.cpu._core", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    core, random = load(sys.argv[1]), np.random.default_rng(0)
    N, K, G, P = 37, 75, 24, 3
    C = -(-K // G)
    planes = random.integers(0, 256, (P, N, -(-K // 8)), dtype=np.uint8)
    planes[:, :, -1] &= (1 << (K % 8)) - 1
    alpha = random.random((P, N, C), dtype=np.float32)
    scale = random.random((N, C), dtype=np.float32)
    zero = random.integers(0, 2**P, (N, C), dtype=np.uint8)
    bits = np.unpackbits(planes, axis=-1, bitorder="little")[..., :K].astype(np.float64)
    spread = np.arange(K) // G
    bcq = (alpha[..., spread] * (2 * bits - 1)).sum(0)
    codes = sum(bits[p] * 2 ** (P - 1 - p) for p in range(P))
    uniform = scale[:, spread] * (codes - zero[:, spread])
    for isa in core.isas():
        core.set_isa(isa)
        weights = (
            (core.prepare_bcq(planes, K, G, alpha), bcq),
            (core.prepare_uniform(planes, K, G, scale, zero), uniform),
        )
        for w, numbers in weights:
            for M in (1, 5, 30):
                x = random.standard_normal((M, K), dtype=np.float32)
                y = np.full((M, N), np.nan, dtype=np.float32)
                core.matmul(x, w, y, "exact")
                wanted = x.astype(np.float64) @ numbers.T
                assert np.abs(y - wanted).max() <= 2e-4 * np.abs(wanted).max(), (isa, M)
    print("ok")


if __name__ == "__main__":
    main()

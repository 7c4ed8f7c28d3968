"""A small product on every instruction set, with numpy only: for valgrind and the like, which cannot bear torch.

python tests/kernels/cpu/threads/small_case.py CORE.so   prints `ok` when every product is right.
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
    four = np.array([0, 1, 0, 0, 1, 0, 0, 0, 0, 1], np.uint8)  # groups of 8: the last of 3 inputs
    codes2, codes4 = (random.integers(0, top, (N, n, 8), dtype=np.uint8) for top, n in ((4, 7), (16, 3)))
    scale_codes, zeros = (random.integers(0, top, (N, 7), dtype=np.uint8) for top in (16, 4))
    second_zeros, second = random.integers(0, 16, (3, 7), dtype=np.uint8), np.full((3, 7), 0.25, np.float32)
    row_scale, row_zero = np.full(N, 0.5, np.float32), random.integers(0, 16, N, dtype=np.uint8)
    block = np.arange(N) // 16
    mixed = np.zeros((N, 10, 8))
    steps = 0.25 * (scale_codes + second_zeros[block])
    mixed[:, four == 0] = steps[..., None] * (codes2 - (zeros[..., None] + 1) / 2)
    mixed[:, four == 1] = 0.5 * (codes4 - row_zero[:, None, None].astype(np.float64))
    mixed = mixed.reshape(N, 80)[:, :K]
    mixed[:, K - 1] += 1.5  # an outlier in each row
    outliers = np.full(N, 1.5, np.float32), np.full(N, K - 1, np.int32), np.arange(N + 1, dtype=np.int32)
    codes = codes2, codes4, scale_codes, zeros, second_zeros, second, (row_scale, row_zero), outliers
    for isa in core.isas():
        core.set_isa(isa)
        weights = (
            (core.prepare_bcq(planes, K, G, alpha), bcq),
            (core.prepare_uniform(planes, K, G, scale, zero), uniform),
            (core.prepare_mixed(K, 16, four, *codes), mixed),
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

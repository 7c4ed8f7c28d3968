"""Autotune the GEMV's tile configs inside a model's step, where other kernels overlap with it (PDL), and print them.

    python bench/tuning/tune_chain.py SHAPE SCHEME [LAYERS] [--rows 1]        e.g. opt-175b bcq:bits=3,group=128 2

What a model gets when its kernels are compiled (kernels/cuda/runtime/autotune.py), with all tile configs below instead
of those that won elsewhere, and for every product. The lines go into kernels/cuda/runtime/autotune.json as they are.
tune_cuda.py does the same for single products.
"""

import argparse
import json
import sys
from itertools import product

import torch

from crelle.bench.model_shapes import RandomWeights
from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels.cuda.executor import CudaExecutor
from crelle.kernels.cuda.planes.bmma_gemv import GemvTileConfig
from crelle.kernels.cuda.planes.weight_layout import ScaleKind
from crelle.kernels.cuda.runtime import autotune
from crelle.models.loader import build as build_model

# (tiles, warps, run, stages)
PIECES = [
    *((1, 8, 1, stages) for stages in (2, 3, 4, 6)),
    *((1, 8, 2, stages) for stages in (2, 3)),
    *((2, 8, 1, stages) for stages in (2, 4, 8)),
    *((1, 16, 1, stages) for stages in (1, 2, 3, 4)),
    *((2, 16, 1, stages) for stages in (2, 4)),
    *((4, 8, 1, stages) for stages in (4, 8)),
    (1, 16, 2, 2),
    (2, 8, 2, 2),
]
CONFIGS = [
    GemvTileConfig(*piece, 1, occupancy, blocks, policy)
    for piece, occupancy, blocks, policy in product(PIECES, (32, 16), (1, 2, 3, 4, 999), (0, 2))
]


def main(shape: str, scheme: str, layers: int, rows: int) -> None:
    device = torch.device("cuda")
    model = build_model(RandomWeights(shape, scheme, device, layers=layers), device)
    kv, c = KVFormat.parse("kv16"), model.spec
    pages = [KVPages.new(kv, 4, c.kv_heads, c.head_size, model.dtype, device) for _ in c.layers]
    executor = CudaExecutor(model, pages, [None] * layers, step=model.cuda_step)

    def show(done: int, of: int) -> None:
        print(f"{done} of {of} products", file=sys.stderr, flush=True)

    for p, config in autotune.tune(executor, [rows], seconds=1e9, progress=show, exhaustive=CONFIGS).items():
        codes = p.kind not in (ScaleKind.BCQ.name, ScaleKind.BCQ_SYMMETRIC.name)
        row = {"codes": codes, "P": p.P, "N": p.N, "K": p.K, "M": p.M, "in_graph": True, "epilogue": p.epilogue}
        groups = {} if p.groups == 2 else {"groups": p.groups}
        print(json.dumps({**row, **groups, "config": list(config)}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("scheme")
    parser.add_argument("layers", nargs="?", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1, help="of x: 1, 2 or 4")
    main(**vars(parser.parse_args()))

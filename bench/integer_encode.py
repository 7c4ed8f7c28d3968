"""Encoding of a Llama layer's inputs for integer products (integer_encode.cu), each launch timed; needs a GPU.

    python bench/integer_encode.py OUT.json [SHAPE]      SHAPE: 7b (default), 70b

For each batch and scheme: microseconds of the four launches of a layer by graph replays, one after the other as in a
step, over more inputs than the L2 cache holds, and bytes read and written per second. The integers are checked against
the reference first. All layers' share of a step: 32 or 80 times the sum, over the step's time (crelle bench decode).
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHAPES = {"7b": (4096, 11008), "70b": (8192, 28672)}
BATCHES = (1, 4, 16, 64, 128, 256, 512, 2048)


def schemes(K: int) -> dict[str, Any]:
    from crelle.formats.activations import ActivationSpec

    return {"a4": ActivationSpec(4, 128, 128, clip=0.9), "a8, one scale": ActivationSpec(8, K, 128)}


def launch(act: Any, K: int, op: Any, permuted: bool, M: int) -> dict[str, Any]:
    from crelle.bench.kernels.cuda_timer import Replay
    from crelle.formats.base import format_of
    from crelle.kernels.cuda.integer.integer_encode import encode, form_of
    from crelle.kernels.cuda.step.fused_linear import Norm

    spec = {"format": "grouped", "shape": [1, K], "bits": 4, "group": 128, "outliers": act.outliers}
    spec |= {"outlier_bits": 8, "permuted": permuted, "activation": act.to_json()}
    w = format_of(spec).random(spec, torch.Generator("cuda").manual_seed(0))
    form, wide = form_of(w), 2 * K if "_MUL" in op else K
    norm = Norm(torch.rand(K, device="cuda").half() + 0.5, None, 1e-5) if "NORM" in op else None
    sets = max(2, min(64, 300_000_000 // (2 * M * wide)))
    inputs = [torch.randn(M, wide, device="cuda").half() for _ in range(sets)]
    addends = [torch.randn(M, K, device="cuda").half() if norm else None for _ in range(sets)]
    plain = torch.randn(M, K, device="cuda").half()
    wanted = act.quantize(plain if w.perm is None else plain[:, w.perm.long()])
    found, _ = encode(plain, form)
    if not torch.equal(found.codes[:M, : form.normal], wanted.codes[:, : form.normal]):
        raise SystemExit(f"{act}, {K} inputs, {M} rows: not the integers of the reference; nothing is timed")

    def call(x: Tensor, addend: Tensor | None) -> Tensor:
        return encode(x, form, op, norm, addend)[0].codes

    calls: list[Callable[[], Tensor]] = [partial(call, *some) for some in zip(inputs, addends, strict=True)]
    us = Replay(calls).microseconds()
    moved = M * (2 * wide + form.places + 4 * form.groups + (4 * K if norm else 0))
    return {"microseconds": us, "gb_per_s": moved / us / 1e3}


def main() -> None:
    out, (width, inner) = Path(sys.argv[1]), SHAPES[sys.argv[2] if len(sys.argv) > 2 else "7b"]
    result: list[dict[str, Any]] = []
    for M in BATCHES:
        for name in schemes(width):
            normed, plain, down = (
                launch(schemes(K)[name], K, op, permuted, M)
                for K, op, permuted in ((width, "RMS_NORM", True), (width, "PLAIN", True), (inner, "SILU_MUL", False))
            )
            layer = 2 * normed["microseconds"] + plain["microseconds"] + down["microseconds"]
            result.append({"batch": M, "scheme": name, "norm": normed, "o": plain, "down": down, "layer_us": layer})
            print(json.dumps(result[-1]), flush=True)
            out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

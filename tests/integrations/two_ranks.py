"""One of two ranks of a feed-forward, as vLLM's tensor parallel layers run it: `python two_ranks.py RANK STORE OUT`.

Ranks share the rows of gate and up, and the inputs of down; a sum over ranks follows. Writes each format's outputs,
whether down was gathered, and how much of it this rank holds.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

from crelle.formats.activations import ActivationSpec
from crelle.formats.base import QuantTensor, format_of
from crelle.integrations.vllm.arrival import Arrival, arrival
from crelle.integrations.vllm.product import Experts, Product

WIDTH, INNER, TOKENS, RANKS = 128, 256, 5, 2
_UNIFORM = {"format": "uniform", "bits": 3, "group": 32, "symmetric": False}
_ATOM = {"bits": 4, "group": 64, "outliers": 64, "permuted": True}
_ACTIVATION = ActivationSpec(4, 64, 64, hadamard=True).to_json()
_PER_TOKEN = ActivationSpec(8, 1 << 17, 64).to_json()
CASES: dict[str, dict[str, Any]] = {
    "bcq": {"format": "bcq", "bits": 3, "group": 32, "bias": True},
    "uniform": _UNIFORM,
    "uniform, one group a row": {**_UNIFORM, "group": WIDTH},
    "affine": {"format": "affine", "bits": 2, "group": 32},
    "nested": {"format": "nested", "bits": 4, "group": 32, "precisions": [2, 4]},
    "mixed": {"format": "mixed", "group": 16, "packing": "aligned", "block": 16, "four": 0, "outliers": 9},
    "dense": {"format": "dense"},
    "act-order": {"format": "permuted", "inner": _UNIFORM},
    "atom": {"format": "grouped", "outlier_bits": 8, **_ATOM, "activation": _ACTIVATION},
    "atom, weights only": {"format": "grouped", "outlier_bits": 8, **_ATOM, "activation": None},
    "atom, in order": {"format": "grouped", "outlier_bits": 8, **_ATOM, "permuted": False, "activation": _ACTIVATION},
    "atom, two levels": {"format": "two-level", **_ATOM, "activation": _PER_TOKEN},
}
GATHERED = {"act-order", "atom", "atom, weights only", "atom, two levels"}


def random(case: str, N: int, K: int, seed: int) -> QuantTensor:
    spec = {**CASES[case], "shape": [N, K]}
    if spec["format"] == "mixed":
        spec["four"] = K // 16 // 4
    if "inner" in spec:
        spec["inner"] = {**spec["inner"], "shape": [N, K]}
    return format_of(spec).random(spec, torch.Generator().manual_seed(seed))


def matrices(case: str) -> tuple[QuantTensor, QuantTensor, QuantTensor]:
    """Return gate, up and down."""
    gate, up = (random(case, INNER, WIDTH, seed) for seed in (1, 2))
    return gate, up, random(case, WIDTH, INNER, 3)


def inputs() -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(4))


def activate(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return silu(gate) * up


def gather(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, -1)


def summed(y: Tensor) -> Tensor:
    dist.all_reduce(y)
    return y


def loaded(w: QuantTensor, outputs: int, columns: int, rank: int) -> Arrival:
    found = arrival("m", w.spec(), outputs, columns, rank, RANKS, None)
    for part, tensor in w.tensors().items():
        found.put(part, tensor)
    return found


def feed_forward(case: str, rank: int) -> dict[str, Any]:
    gate, up, down = matrices(case)
    into = [loaded(w, INNER // RANKS, WIDTH, rank).require()[0] for w in (gate, up)]
    out = loaded(down, WIDTH, INNER // RANKS, rank)
    share, product = out.gathered, Product(out.require(), torch.float32)
    h = activate(Product(into, torch.float32)(inputs()))
    y = product(h) if share is None else share.placed(product(gather(h)), WIDTH)
    pair = Product(into, torch.float32), product
    experts = Experts([pair], activate, False, gather, [share])
    weights, ids = torch.full((TOKENS, 1), 0.5), torch.zeros(TOKENS, 1, dtype=torch.long)
    held = sum(t.nbytes for t in out.require()[0].tensors().values()) / sum(t.nbytes for t in down.tensors().values())
    both = summed(y), summed(experts(inputs(), weights, ids))
    return {"gathered": share is not None, "held": held, "y": both[0], "experts": both[1]}


if __name__ == "__main__":
    rank, store, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.save({case: feed_forward(case, rank) for case in CASES}, out)
    dist.destroy_process_group()

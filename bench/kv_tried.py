"""What else was tried for 4-bit keys, beside kv4: SmolLM2, WikiText-2, the first three windows of 1024.

    python bench/kv_tried.py OUT.json DATA      DATA: a folder with text/wikitext2-test.txt

Each way is emulated: keys are rounded as it would and go on as floats. Values are rounded as kv4 rounds them in all
rows. The rows go to `tried` in OUT.json, which bench/kv_quality.py writes; its docstring says what divergence is.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.engine.llm import LLM
from crelle.eval.smollm2 import smollm2
from crelle.formats.kv.pages import KVFormat, dequantize, hadamard, quantize
from crelle.models.cache import CacheSizes, KVCache
from crelle.models.rope import angles, rotate

CONTEXT, WINDOWS = 1024, 3
KV4 = KVFormat(4)
Way = Callable[[int, Tensor], Tensor]  # (layer, keys [B, T, Hkv, D]) -> the same, rounded


def hadamard_rounded(x: Tensor) -> Tensor:
    """Round as kv4 does, without centres."""
    groups = KV4.groups(x.shape[-1])
    return hadamard(dequantize(*quantize(hadamard(x, KV4), 4, groups), 4), KV4)


def words(x: Tensor) -> Tensor:
    """Round the last dimension with one word of kv4."""
    return dequantize(*quantize(x, 4, 1), 4)


def halves(x: Tensor) -> Tensor:
    """Round the last dimension with its scale and least value as two f16; the range need not hold 0."""
    low, high = x.amin(-1, keepdim=True).half().float(), x.amax(-1, keepdim=True)
    scale = ((high - low) / 15).half().float().clamp_min(1e-7)
    return ((x - low) / scale).round().clamp(0, 15) * scale + low


def by_channel(x: Tensor, page: int, how: Callable[[Tensor], Tensor]) -> Tensor:
    """One scale and zero for each channel of a head and page."""
    B, T, H, D = x.shape
    cut = x.reshape(B, T // page, page, H, D).movedim(2, -1)  # [B, pages, H, D, page]
    return how(cut).movedim(-1, 2).reshape(x.shape)


def turned_halves(x: Tensor, group: int) -> Tensor:
    return hadamard(halves(hadamard(x, KV4).reshape(*x.shape[:-1], -1, group)).reshape(x.shape), KV4)


def ways(llm: LLM) -> dict[str, tuple[float, Way]]:
    """Return by name the bits per value, keys and values together, and how keys are rounded."""
    centers = llm.model.key_centers
    cos, sin = angles(llm.model.spec.ropes[0], torch.arange(CONTEXT), torch.float32)

    def centered(f: Callable[[Tensor], Tensor]) -> Way:
        return lambda i, k: f(k - centers[i]) + centers[i]

    def before_rope(page: int) -> Way:
        return lambda i, k: rotate(by_channel(rotate(k, cos, -sin), page, halves), cos, sin)

    def first(f: Callable[[Tensor], Tensor]) -> Way:
        return lambda i, k: torch.cat([f(k[:, :1]), centered(hadamard_rounded)(i, k[:, 1:])], 1)

    return {
        "kv4": (4.5, centered(hadamard_rounded)),
        "kv4, keys with two f16": (4.75, centered(lambda k: turned_halves(k, 32))),
        "kv4, the first token's key not centred": (4.5, first(hadamard_rounded)),
        "kv4, the first token's key exact": (4.5, first(lambda k: k)),
        "keys by channel after rope, centred, pages of 16": (4.75, centered(lambda k: by_channel(k, 16, words))),
        "keys by channel after rope, centred, pages of 32": (4.5, centered(lambda k: by_channel(k, 32, words))),
        "keys by channel before rope, two f16, pages of 16": (5.25, before_rope(16)),
        "keys by channel before rope, two f16, pages of 32": (4.75, before_rope(32)),
        "keys by channel before rope, two f16, pages of 64": (4.5, before_rope(64)),
    }


class Rounding(KVCache):
    """A cache of floats that rounds what it is given."""

    keys: Way

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().append(layer, self.keys(layer, k), hadamard_rounded(v))


def main() -> None:
    out, data = Path(sys.argv[1]), Path(sys.argv[2])
    llm = LLM.load(smollm2(), device="cpu")
    c = llm.model.spec
    ids = llm.tokenizer.encode((data / "text" / "wikitext2-test.txt").read_text(encoding="utf-8"), bos=False)
    windows = torch.tensor(ids[: WINDOWS * CONTEXT]).view(-1, 1, CONTEXT)
    count = WINDOWS * (CONTEXT - 1)

    def predicted(window: Tensor, cache: KVCache) -> Tensor:
        return llm.model(window, cache)[0, :-1].log_softmax(-1)

    plain = [predicted(window, llm.model.new_cache()) for window in windows]
    exact = sum(F.nll_loss(p, w[0, 1:], reduction="sum").item() for p, w in zip(plain, windows, strict=True))
    rows = []
    for name, (bits, keys) in ways(llm).items():
        loss = divergence = 0.0
        for window, p in zip(windows, plain, strict=True):
            cache = Rounding(
                CacheSizes(len(c.layers), 1, c.kv_heads, c.head_size, c.context, torch.float32, torch.device("cpu"))
            )
            cache.keys = keys
            said = predicted(window, cache)
            loss += F.nll_loss(said, window[0, 1:], reduction="sum").item()
            divergence += F.kl_div(said, p, log_target=True, reduction="sum").item()
        row = {"way": name, "bits_per_value": bits, "ratio": math.exp((loss - exact) / count)}
        rows.append(row | {"divergence": divergence / count})
        print(rows[-1], flush=True)
    result = json.loads(out.read_text()) if out.exists() else {}
    result["tried"] = {"command": "python bench/kv_tried.py OUT.json DATA", "windows": WINDOWS, "rows": rows}
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()

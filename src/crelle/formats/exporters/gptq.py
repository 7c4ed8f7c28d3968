"""A model with uniform grids as a GPTQ directory, bit for bit: what vLLM, GPTQModel and transformers load.

The layout is that of crelle.formats.importers.gptq. It has room for 2, 3, 4 and 8 bits, f16 scales, any group, and
shapes of which K b and N b fill whole 32-bit words; v1 (which stores zero - 1) has none for a zero point of 0.
Matrices may differ in bits and group: the commonest go into the config, the others into its `dynamic` (GPTQModel).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crelle.errors import CrelleError, SchemeError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import UniformTensor
from crelle.formats.checkpoint_writer import CheckpointWriter
from crelle.formats.composite import PermutedTensor
from crelle.formats.destination import destination, refuse_overlap
from crelle.formats.importers.gptq import BITS
from crelle.formats.open import Weights
from crelle.formats.ownership import HF_INDEX
from crelle.formats.packing import pack_words
from crelle.formats.tokenizer_files import check_copied_files
from crelle.version import __version__

_RECIPE = {"export": "gptq"}
_EMBEDDINGS = ("embed_tokens", ".wte", ".wpe")
Progress = Callable[[int, int, str], None]  # weights done, weights in all, the matrix's name


class Grid(NamedTuple):
    """What the config says about a matrix."""

    bits: int
    group: int  # -1: a whole row
    symmetric: bool
    permuted: bool


def export_gptq(
    weights: Weights,
    out: Path,
    *,
    version: int = 2,
    overwrite: bool = False,
    progress: Progress | None = None,
    warn: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Write a model as a GPTQ directory, a shard a layer; return its quantization_config."""
    if version not in (1, 2):
        raise SchemeError(f"there is no GPTQ version {version}; choose 1 or 2")
    out = destination(out)
    refuse_overlap(out, weights.path)
    if weights.path.is_dir():
        check_copied_files(weights.path)
    sizes = {name: weights.shape(name) for name in weights.names()}
    shards: dict[str, list[str]] = {}
    for name in sizes:
        layer = re.match(r"(.*?\.\d+)\.", name)
        shards.setdefault(layer[1] if layer else "rest", []).append(name)
    grids: dict[str, Grid] = {}
    plain: list[str] = []
    done, total = 0, sum(map(prod, sizes.values()))
    with _writer(out, overwrite) as writer:
        for i, names in enumerate(shards.values(), start=1):
            tensors: dict[str, Tensor] = {}
            for name in names:
                module, _, kind = name.rpartition(".")
                w = weights.matrix(module) if kind == "weight" and len(sizes[name]) == 2 else None
                if w is None or w.format == "dense":
                    tensors[name] = _as_hugging_face(weights, name)
                    if w is not None:
                        plain.append(module)
                else:
                    try:
                        if module.endswith(_EMBEDDINGS):
                            raise UnsupportedError("GPTQ has no quantized embedding; quantize without --head")
                        packed, grids[module] = pack(w, version)
                    except CrelleError as e:
                        raise type(e)(f"{weights.path}, '{module}': {e}") from e
                    tensors |= {f"{module}.{part}": t for part, t in packed.items()}
                done += prod(sizes[name])
                if progress:
                    progress(done, total, module)
            writer.add(f"model-{i:05d}-of-{len(shards):05d}.safetensors", {}, tensors)
        if not grids:
            raise UnsupportedError(f"{weights.path} has no quantized matrix to export; quantize it first")
        quantization = _declaration(grids, plain, version)
        weights.copy_tokenizer(writer.partial)
        config = {k: v for k, v in weights.config.items() if k not in ("quantization_config", "norm_weight_offset")}
        writer.publish({**config, "quantization_config": quantization}, HF_INDEX)
    for sentence in writer.all_warnings() if warn else ():
        warn(sentence)  # type: ignore[misc]
    return quantization


def _as_hugging_face(weights: Weights, name: str) -> Tensor:
    """Return a tensor as Hugging Face stores it: see `Weights` for what a reader may have found otherwise."""
    w = weights.read(name)
    if weights.transposed(name):
        return w.T.contiguous()
    if weights.config.get("norm_weight_offset") == 0 and name.endswith("norm.weight"):
        return (w.float() - 1).to(w.dtype)
    return w


@contextmanager
def _writer(out: Path, overwrite: bool) -> Iterator[CheckpointWriter]:
    """Write under another name; what a refused or killed export left behind is not a run to go on with."""
    with CheckpointWriter(out, _RECIPE, overwrite=overwrite, restart=True) as writer:
        try:
            yield writer
        except CrelleError:
            writer.discard()
            raise


def pack(w: QuantTensor, version: int) -> tuple[dict[str, Tensor], Grid]:
    """Return the GPTQ tensors of a matrix, and its grid; refuses what the layout has no room for."""
    N, K = w.shape
    inner, order = (w.inner, w.order.long()) if isinstance(w, PermutedTensor) else (w, torch.arange(K))
    if not isinstance(inner, UniformTensor):
        raise UnsupportedError(f"GPTQ stores uniform grids (scheme rtn, gptq, awq, …), and this is '{inner.format}'")
    bits, scale = inner.bits, inner.scale.to(torch.float16)
    if bits not in BITS:
        raise UnsupportedError(f"GPTQ has 2, 3, 4 and 8 bits, and this has {bits}")
    if K * bits % 32 or N * bits % 32:
        raise UnsupportedError(f"{N} x {K} at {bits} bits does not fill whole 32-bit words, which GPTQ asks for")
    if not torch.equal(scale.float(), inner.scale.float()):
        raise UnsupportedError("a scale is not representable in f16, and GPTQ stores f16")
    zero = inner.zeros()
    if version == 1 and bool((zero == 0).any()):
        raise UnsupportedError("GPTQ v1 cannot store a zero point of 0; use --gptq-version 2")
    codes, g_idx = torch.empty(N, K, dtype=torch.uint8), torch.empty(K, dtype=torch.int32)
    codes[:, order] = inner.codes()
    g_idx[order] = (torch.arange(K) // inner.group).to(torch.int32)
    packed = {
        "qweight": pack_words(codes, bits).T,
        "qzeros": pack_words((zero - int(version == 1)).T, bits),
        "scales": scale.T,
        "g_idx": g_idx,
    }
    return packed, Grid(bits, inner.group if inner.group < K else -1, inner.zero is None, inner is not w)


def _declaration(grids: Mapping[str, Grid], plain: list[str], version: int) -> dict[str, Any]:
    """Return the quantization_config: the commonest bits and group, and what differs from them by module."""
    kinds = {m: (g.bits, g.group) for m, g in grids.items()}
    (bits, group), _ = Counter(kinds.values()).most_common(1)[0]
    dynamic: dict[str, Any] = {
        f"+:^{re.escape(m)}$": {"bits": b, "group_size": g} for m, (b, g) in kinds.items() if (b, g) != (bits, group)
    }
    dynamic |= {f"-:^{re.escape(m)}$": {} for m in plain if re.search(r"\.\d+\.", m)}
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2" if version == 2 else "gptq",
        "bits": bits,
        "group_size": group,
        "sym": all(g.symmetric for g in grids.values()),
        "desc_act": any(g.permuted for g in grids.values()),
        "lm_head": "lm_head" in grids,
        **({"dynamic": dynamic} if dynamic else {}),
        "meta": {"quantizer": [f"crelle:{__version__}"]},
    }

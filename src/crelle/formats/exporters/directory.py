"""A model as a Hugging Face directory in another project's layout.

The layers' matrices keep their values bit for bit. An 8-bit embedding or head that the layout has no place for is
written as fp16, which rounds some of its values; a warning says how many.

What GPTQ, AWQ and compressed-tensors share: a shard a layer, an index, the tokenizer, a config with a
`quantization_config`; all under another name until it is whole. A `Layout` packs a matrix and writes that config.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from crelle.errors import CrelleError, UnsupportedError
from crelle.formats.base import QuantTensor
from crelle.formats.bcq import UniformTensor
from crelle.formats.storage.checkpoint_writer import CheckpointWriter
from crelle.formats.storage.destination import destination, refuse_overlap
from crelle.formats.storage.open import Weights
from crelle.formats.storage.ownership import EXPORTER, HF_INDEX
from crelle.formats.storage.tokenizer_files import check_copied_files
from crelle.formats.wrappers.composite import PermutedTensor
from crelle.version import __version__

_ROWS = 4096  # of a matrix, which are dequantized at a time
EMBEDDINGS = ("embed_tokens", ".wte", ".wpe")
Progress = Callable[[int, int, str], None]  # weights done, weights in all, the matrix's name
Warn = Callable[[str], None]


class Grid(NamedTuple):
    """What a config says about a matrix."""

    bits: int
    group: int  # -1: a whole row
    symmetric: bool
    permuted: bool
    kind: str = "uniform"  # or four-bit floats: mxfp4, nvfp4


class Layout(Protocol):
    """How one project stores a quantized matrix."""

    method: str  # as --to names it
    title: str  # as a sentence names it

    def pack(self, w: QuantTensor, module: str) -> tuple[dict[str, Tensor], Grid]:
        """Return the tensors that stand for a matrix, and its grid; refuses what the layout has no room for."""
        ...

    def declare(self, grids: Mapping[str, Grid], plain: list[str]) -> dict[str, Any]:
        """Return the quantization_config; `plain` are the matrices that are not quantized."""
        ...


def export_directory(
    weights: Weights,
    out: Path,
    layout: Layout,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    warn: Warn | None = None,
) -> dict[str, Any]:
    """Write a model in a layout, a shard a layer; return its quantization_config."""
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
    rounded: list[str] = []  # what became of embedding and head of 8 bits, which not all layouts have
    done, total = 0, sum(map(prod, sizes.values()))
    with _writer(out, layout.method, overwrite) as writer:
        for i, names in enumerate(shards.values(), start=1):
            tensors: dict[str, Tensor] = {}
            for name in names:
                module, _, kind = name.rpartition(".")
                w = weights.matrix(module) if kind == "weight" and len(sizes[name]) == 2 else None
                if w is None or w.format == "dense":
                    tensors[name] = _as_hugging_face(weights, name)
                    if w is not None:
                        plain.append(module)
                elif w.bits == 8 and not _fits(layout, w, module):
                    tensors[name], change = _as_half(w)
                    plain.append(module)
                    rounded.append(
                        f"{module} has 8 bits, which {layout.title} cannot store; it is written as fp16, {change}"
                    )
                else:
                    with speaking_of(weights, module):
                        if module.endswith(EMBEDDINGS):
                            raise UnsupportedError(
                                f"{layout.title} has no quantized embedding; quantize the head to 8 bits or not at all"
                            )
                        packed, grids[module] = layout.pack(w, module)
                    tensors |= {f"{module}.{part}": t for part, t in packed.items()}
                done += prod(sizes[name])
                if progress:
                    progress(done, total, module)
            writer.add(f"model-{i:05d}-of-{len(shards):05d}.safetensors", {}, tensors)
        if not grids:
            raise UnsupportedError(f"{weights.path} has no quantized matrix to export; quantize it first")
        quantization = layout.declare(grids, plain)
        weights.copy_tokenizer(writer.partial)
        config = {k: v for k, v in weights.config.items() if k not in ("quantization_config", "norm_weight_offset")}
        mark = {EXPORTER: f"crelle:{__version__}"}
        writer.publish({**config, "quantization_config": quantization}, HF_INDEX, mark)
    for sentence in (*rounded, *writer.all_warnings()) if warn else ():
        warn(sentence)  # type: ignore[misc]
    return quantization


def _as_half(w: QuantTensor) -> tuple[Tensor, str]:
    """Return a matrix as fp16, and in words how many of its values that rounds, and by how much."""
    N, K = w.shape
    half, changed, most = torch.empty(N, K, dtype=torch.float16), 0, 0.0
    for at in range(0, N, _ROWS):  # the whole of it in f32 would be twice as large as the result
        part = w.rows(slice(at, at + _ROWS))
        exact, half[at : at + _ROWS] = part.dequantize(), part.dequantize(torch.float16)
        error = (half[at : at + _ROWS].float() - exact).abs()
        changed, most = changed + int(error.count_nonzero()), max(most, float(error.max()))
    if not changed:
        return half, "without rounding"
    return half, f"which rounds {changed / (N * K):.0%} of its values by at most {most:.1g}"


def _fits(layout: Layout, w: QuantTensor, module: str) -> bool:
    """Tell whether a layout has a place for an embedding or a head of 8 bits; other matrices are not asked about."""
    if module.endswith(EMBEDDINGS):
        return False
    try:
        return module != "lm_head" or bool(layout.pack(w, module))
    except UnsupportedError:
        return False


@contextmanager
def speaking_of(weights: Weights, module: str) -> Iterator[None]:
    """Put the model's and the matrix's name before a refusal."""
    try:
        yield
    except CrelleError as e:
        raise type(e)(f"{weights.path}, '{module}': {e}") from e


def _as_hugging_face(weights: Weights, name: str) -> Tensor:
    """Return a tensor as Hugging Face stores it: see `Weights` for what a reader may have found otherwise."""
    w = weights.read(name)
    if weights.transposed(name):
        return w.T.contiguous()
    if weights.config.get("norm_weight_offset") == 0 and name.endswith("norm.weight"):
        return (w.float() - 1).to(w.dtype)
    return w


@contextmanager
def _writer(out: Path, method: str, overwrite: bool) -> Iterator[CheckpointWriter]:
    """Write under another name; what a refused or killed export left behind is not a run to go on with."""
    with CheckpointWriter(out, {"export": method}, overwrite=overwrite, restart=True) as writer:
        try:
            yield writer
        except CrelleError:
            writer.discard()
            raise


def uniform_of(w: QuantTensor, title: str, bits: tuple[int, ...]) -> tuple[UniformTensor, Tensor, Tensor]:
    """Return a matrix's uniform grid, and its codes [N, K] and groups [K] in the inputs' own order."""
    inner, perm = (w.inner, w.order.long()) if isinstance(w, PermutedTensor) else (w, torch.arange(w.shape[1]))
    if not isinstance(inner, UniformTensor):
        raise UnsupportedError(f"{title} stores uniform grids (scheme rtn, gptq, awq, …), but this is '{inner.format}'")
    if inner.bits not in bits:
        *most, last = map(str, bits)
        has = f"{', '.join(most)} and {last}" if most else last
        raise UnsupportedError(f"{title} has {has} bits, but this has {inner.bits}")
    codes, g_idx = torch.empty(w.shape, dtype=torch.uint8), torch.empty(len(perm), dtype=torch.int32)
    codes[:, perm] = inner.codes()
    g_idx[perm] = (torch.arange(len(perm)) // inner.group).to(torch.int32)
    return inner, codes, g_idx


def half_scale(scale: Tensor, title: str) -> Tensor:
    """Return scales as f16, refusing those that f16 does not hold exactly."""
    half = scale.to(torch.float16)
    if not torch.equal(half.float(), scale.float()):
        raise UnsupportedError(f"a scale is not representable in f16, which {title} stores")
    return half


def require_whole_groups(K: int, group: int, title: str) -> None:
    """Refuse a shorter last group."""
    if K % group:
        raise UnsupportedError(f"its group size {group} does not divide the {K} inputs, which {title} requires")

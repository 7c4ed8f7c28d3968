"""The heat map of `crelle inspect --plot`: the range of every group of input channels, and which have more bits."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.base import QuantTensor, group_bits
from crelle.plots import pyplot

_WIDE = 64  # inputs of a column where a matrix has one group only, or groups of its rows' own
_CELL = 3  # pixels of a cell, so that a mark has room in the middle


class GroupRanges(NamedTuple):
    """One matrix: a row of the map."""

    name: str
    ranges: Tensor  # f32 [C], of each group of inputs, the mean over the outputs
    bits: Tensor | None  # uint8 [C], where groups differ


def group_ranges(name: str, w: QuantTensor) -> GroupRanges:
    """Return the mean range of the weights in each group of inputs, and the groups' bits."""
    N, K = w.shape
    G = w.group if w.group is not None and w.group < K else min(_WIDE, K)
    values = w.dequantize()
    short = -K % G
    groups = torch.nn.functional.pad(values, (0, short), value=torch.nan).reshape(N, -1, G)
    low, high = groups.nan_to_num(torch.inf).amin(-1), groups.nan_to_num(-torch.inf).amax(-1)
    return GroupRanges(name, (high - low).mean(0), group_bits(w))


def heat_map(path: Path, rows: Sequence[GroupRanges]) -> None:
    """Draw one panel for each kind of matrix (q_proj, down_proj, …): layers down, groups of inputs across."""
    if not rows:
        raise UnsupportedError("the model has no quantized matrix to plot")
    plt = pyplot()
    kinds: dict[str, list[GroupRanges]] = {}
    for row in rows:
        kinds.setdefault(row.name.rsplit(".", 1)[-1], []).append(row)
    tall = max(len(found) for found in kinds.values())
    columns = 2 if len(kinds) > 1 else 1
    lines = -(-len(kinds) // columns)
    size = (7 * columns, lines * max(2.2, 0.09 * tall + 1.0) + 0.6)
    figure, panels = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    for axes in panels.flat[len(kinds) :]:
        axes.set_visible(False)
    for axes, (kind, found) in zip(panels.flat, kinds.items(), strict=False):
        image = axes.imshow(picture(found, plt.get_cmap("viridis")), aspect="auto", interpolation="nearest")
        wide, high = image.get_extent()[1], image.get_extent()[2]
        image.set_extent((0, (wide + 0.5) / _CELL, (high + 0.5) / _CELL, 0))
        share = _share_of_marked(found)
        axes.set_title(kind if share is None else f"{kind}: {share:.0%} of the groups have more bits", fontsize=9)
        axes.set_xlabel("group of input channels", fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
        axes.tick_params(labelsize=7)
    figure.suptitle("Range of each group (dark: small); red: the groups with more bits", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def picture(rows: Sequence[GroupRanges], colours: Any) -> Any:
    """Return an image [rows, groups, RGB], 3 x 3 pixels a group: its range on a log scale, a red middle: more bits."""
    C = max(len(row.ranges) for row in rows)
    image = torch.ones(len(rows), _CELL, C, _CELL, 3)
    for i, row in enumerate(rows):
        level = row.ranges.clamp(min=1e-12).log2()
        level = (level - level.min()) / (level.max() - level.min()).clamp(min=1e-6)
        image[i, :, : len(level)] = torch.tensor(colours(level.numpy())[:, :3]).float()[None, :, None]
        if row.bits is not None:
            marked = (row.bits > row.bits.min()).nonzero().flatten()
            image[i, _CELL // 2, marked, _CELL // 2] = torch.tensor([0.9, 0.1, 0.1])
    return image.reshape(len(rows) * _CELL, C * _CELL, 3).numpy()


def by_layer(names: Sequence[str]) -> list[str]:
    """Return the names with numbers in their order: layer 10 comes after layer 9."""
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def _share_of_marked(rows: Sequence[GroupRanges]) -> float | None:
    bits = [row.bits for row in rows if row.bits is not None]
    if not bits:
        return None
    return sum(int((b > 2).sum()) for b in bits) / sum(len(b) for b in bits)

"""Tile configs of mixed_gemv.cu: by the instructions of its loop, few tiles as bench/tuning/tune_mixed.py finds.

`dataflow_configs` has those of the paper's comparison, from loading, waiting, decoding, multiplying on.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, get_args

import torch

from crelle.kernels.cuda.launch import multiprocessors
from crelle.kernels.cuda.mixed.mixed_layout import MixedWeight, unit2_bytes

Dataflow = Literal["synchronous", "pipelined", "asynchronous"]
DATAFLOWS: tuple[Dataflow, ...] = get_args(Dataflow)
TOKENS = (1, 2, 4, 8)  # of a launch
_HOPPER = 227 * 1024  # bytes of shared memory of a thread block, or of all on a multiprocessor less 1 KB for each more
_SHARED_WORK = 0.45  # instructions of a unit that all tiles share, over those of a tile


@dataclass(frozen=True, slots=True)
class MixedTileConfig:
    """Tile config of mixed_gemv.cu; its template parameters."""

    tiles: int  # of 16 rows that a thread block has at a time; 1 for more than two tokens
    warps: int  # that take turns at the units of inputs
    stages: int  # of a warp's load pipeline
    occupancy: int  # thread blocks that a multiprocessor holds
    asynchronous: bool = False  # scales of the next unit are decoded beside the multiplication of this one


class _Form(NamedTuple):
    """What the choice depends on: tiles, units of inputs, sets of scales for 16 inputs, bytes of an encoded token."""

    tiles: int
    units: int
    subs: int
    x_bytes: int


def _form(w: MixedWeight) -> _Form:
    return _Form(w.tiles.shape[0], w.U2 + w.U4, w.subs, w.x_bytes)


def shared_bytes(w: MixedWeight, tokens: int, c: MixedTileConfig) -> int:
    """Dynamic shared memory: x, the pipelines, two pages of sums, zeros, a barrier; as in mixed_gemv.cu."""
    return _shared_bytes(_form(w), tokens, c)


def at_a_time(w: MixedWeight, tokens: int, room: int | None = None) -> int:
    """Return how many tokens one launch takes: no more than are there, or than shared memory holds."""
    form, least, room = _form(w), MixedTileConfig(1, 8, 2, 1), room or room_of_device()
    fitting = [m for m in TOKENS if m == 1 or _shared_bytes(form, m, least) <= room]
    return next((m for m in fitting if m >= tokens), fitting[-1])


def choose(
    w: MixedWeight, tokens: int, processors: int | None = None, room: int | None = None, asynchronous: bool = False
) -> MixedTileConfig:
    """Return a tile config: tiles shared out evenly among the processors, units among warps, all loads in flight."""
    return _choose(_form(w), tokens, processors or multiprocessors(), room or room_of_device(), asynchronous)


def dataflow_configs(w: MixedWeight, tokens: int, dataflow: Dataflow, room: int | None = None) -> list[MixedTileConfig]:
    """Return the tile configs to choose from for a way of decoding scales.

    synchronous     a warp loads a unit, waits for it, decodes its scales, multiplies, and only then loads the next
    pipelined       the next units are being loaded meanwhile; scales are decoded where they are used
    asynchronous    the next units are being loaded, and the next one's scales decoded beside the multiplication
    """
    form, room, asynchronous = _form(w), room or room_of_device(), dataflow == "asynchronous"
    found = []
    for tiles in (1, 2) if tokens <= 2 else (1,):
        for warps, occupancy in ((8, 2), (10, 2), (16, 1)):
            for stages in (1,) if dataflow == "synchronous" else (2, 4):
                c = MixedTileConfig(tiles, warps, stages, occupancy, asynchronous)
                fits = occupancy * (_shared_bytes(form, tokens, c) + 1024) <= room + 1024
                if fits and warps * occupancy <= _most_warps(form.subs, tokens, tiles, asynchronous):
                    found.append(c)
    return found


def _shared_bytes(form: _Form, tokens: int, c: MixedTileConfig) -> int:
    queue = c.stages * (c.tiles * unit2_bytes(form.subs) + 8) + (c.stages & 1) * 8
    return tokens * form.x_bytes + c.warps * (queue + 256 * c.tiles * tokens) + 80


@cache
def _choose(form: _Form, tokens: int, processors: int, room: int, asynchronous: bool) -> MixedTileConfig:
    def fits(c: MixedTileConfig) -> bool:
        if c.warps * c.occupancy > _most_warps(form.subs, tokens, c.tiles, asynchronous):
            return False
        return c.occupancy * (_shared_bytes(form, tokens, c) + 1024) <= room + 1024

    def cost(c: MixedTileConfig) -> tuple[float, ...]:
        rounds = -(-form.tiles // (c.tiles * c.occupancy * processors))
        turns = -(-form.units // c.warps) if rounds == 1 else form.units / c.warps
        return rounds * turns * c.warps * (c.tiles + _SHARED_WORK) * c.occupancy, -c.warps * c.occupancy

    if form.tiles <= 2 * processors and fits(few := MixedTileConfig(1, 10, 2, 2, asynchronous)):
        return few  # a tile for each thread block, all of them at once
    for occupancy in (2, 1):
        found = []
        for tiles in (1, 2, 3) if tokens <= 2 else (1,):
            for warps in (8, 10, 11, 12, 16):
                deep = [MixedTileConfig(tiles, warps, s, occupancy, asynchronous) for s in (4, 3, 2) if tiles * s <= 6]
                found += [c for c in deep if fits(c)][:1]
        if found:
            return min(found, key=cost)
    return MixedTileConfig(1, 8, 2, 1, asynchronous)


def _most_warps(subs: int, tokens: int, tiles: int, asynchronous: bool) -> int:
    """Return how many warps of a multiprocessor have enough registers, so that nothing spills."""
    if asynchronous:  # holds the scales of two units
        return 16 if tiles <= 2 and tokens <= 2 and subs == 1 else 12 if tiles == 1 else 0
    if tokens > 4:
        return 16 if subs == 1 else 11
    if tiles > 1:
        return (20 if tiles == 2 else 16) if subs == 1 else 16 if tiles == 2 else 0
    return 22 if tokens <= 2 and subs == 1 else 20


def room_of_device() -> int:
    """Bytes of shared memory that a thread block may have on the current device."""
    return _room_of(torch.cuda.current_device())


@cache
def _room_of(device: int) -> int:
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _HOPPER))

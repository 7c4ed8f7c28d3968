"""Launches viterbi.cu: the search for trellis codes, and LDLQ with it, without the host between blocks of 4 inputs.

A thread block has 32 rows from the first of 128 inputs to the last: what it needs of other blocks is nothing. Before
each 128 inputs one matrix product has the errors of all before, and one launch makes their tables, 512 KB for each 4.
So a matrix [N, K] takes 3 K / 128 launches.
"""

import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from crelle.formats.trellis import BITS, CODES, COLUMNS, ROWS, STATES, WEIGHTS
from crelle.kernels import cuda
from crelle.kernels.cuda.launch import load, most_shared_memory, multiprocessors
from crelle.kernels.cuda.solver.sweep import no_tf32

_FILE = "solver/viterbi.cu"
_INPUTS = 128  # whose errors reach later ones by one product
_THREADS, _UNITS = 1024, 16  # as in viterbi.cuh
_TABLE = 4 * STATES * 2  # bytes
_SMALL = 3072  # bytes of shared memory outside the table and the costs
_ROOMS = 227 << 10, 163 << 10, 99 << 10  # bytes of shared memory that a thread block can have: sm_90, sm_80, sm_89
_KINDS = sorted({(code.shift(b), code.weights) for code in CODES.values() for b in BITS if not code.weights * b % 1})


def kept(shift: int, room: int) -> int:
    """Return how many sixteenths of the table fit into shared memory, beside two times the costs of all groups."""
    return min(_UNITS, (room - _SMALL - 4 * (STATES >> shift)) // (_TABLE // _UNITS))


def variant(name: str, shift: int, weights: int, room: int) -> tuple[str, str]:
    return _FILE, f"crelle::{name}<{shift}, {weights}, {kept(shift, room)}>"


def tables_variant(shift: int, weights: int) -> tuple[str, str]:
    return _FILE, f"crelle::viterbi_tables<{shift}, {weights}>"


def variants() -> Iterator[tuple[str, str]]:
    """Return what CI compiles."""
    for i, (shift, weights) in enumerate(_KINDS):
        yield tables_variant(shift, weights)
        yield variant("viterbi_rings", shift, weights, _ROOMS[0])
        yield variant("encode_columns", shift, weights, _ROOMS[0])
        if kept(shift, room := _ROOMS[1 + i % 2]) > 0:
            yield variant(("viterbi_rings", "encode_columns")[i // 2 % 2], shift, weights, room)


def usable(x: Tensor, shift: int) -> bool:
    """Whether the kernels of this module can search for codes near x."""
    if x.device.type != "cuda" or x.dtype != torch.float32 or cuda.available() is not None:
        return False
    with torch.cuda.device(x.device):
        return kept(shift, most_shared_memory()) > 0


def rings(values: Tensor, roots: Tensor, x: Tensor, shift: int) -> Tensor:
    """Return the states uint16 [S, 128 / V] of the rings that are nearest to x int16 [S, 128].

    values f32 [states, V]; roots f32 [4 / V, V, V]: state i has the values times roots[i % (4 / V)].
    """
    V, S = values.shape[1], len(x)
    states = torch.empty(S, WEIGHTS // V, dtype=torch.uint16, device=x.device)
    if S:
        search = _Search(x, shift, V, S)
        table = search.tables(values.contiguous(), roots.contiguous()[None])
        search("viterbi_rings", x.contiguous(), table, search.workspace, states, S)
    return states


@no_tf32()
def encode(rows: Tensor, mix: Tensor, roots: Tensor, values: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return the values f32 [N, K] and the rings uint8 [N / 32, K / 4, bytes] of rows f32 [N, K], in units of values.

    N and K are whole blocks. mix f32 [K, K]: of the error of one input in the later ones; roots f32 [K / 4, 4 / V, V,
    V]: of each block, times the unit of the search; values f32 [states, V].
    """
    (N, K), V = rows.shape, values.shape[1]
    assert N % ROWS == 0
    assert K % COLUMNS == 0
    rows, mix, roots, values = (t.contiguous() for t in (rows, mix, roots, values))
    search = _Search(rows, shift, V, N // ROWS)
    found, left = torch.empty_like(rows), torch.empty_like(rows)
    codes = torch.empty(N // ROWS, K // COLUMNS, WEIGHTS // V * shift // 8, dtype=torch.uint8, device=rows.device)
    for begin in range(0, K, _INPUTS):
        end = min(begin + _INPUTS, K)
        wanted = torch.addmm(rows[:, begin:end], left[:, :begin], mix[:begin, begin:end])
        own = roots[begin // COLUMNS : end // COLUMNS]
        tables = search.tables(values, own)
        here = [t[:, begin:] for t in (left, found)]
        of_block = codes[:, begin // COLUMNS :]
        tensors = wanted, rows[:, begin:], mix[begin:, begin:], own, values, tables, search.workspace, *here, of_block
        sizes = K, codes.stride(0), N, (end - begin) // COLUMNS
        search("encode_columns", struct.pack("=10Q2q2i", *(t.data_ptr() for t in tensors), *sizes))
    return found, codes


class _Search:
    """The thread blocks of a search, each with a workspace."""

    def __init__(self, like: Tensor, shift: int, weights: int, sequences: int) -> None:
        on_gpu = like.device.type == "cuda"  # elsewhere kernels are emulated
        self.room = most_shared_memory() if on_gpu else _ROOMS[0]
        self.blocks = min(sequences, multiprocessors() if on_gpu else 2)
        self.shift, self.weights = shift, weights
        costs = (WEIGHTS // weights + 1) * (STATES >> shift)
        self.workspace = torch.empty(self.blocks * costs, dtype=torch.int16, device=like.device)

    def tables(self, values: Tensor, roots: Tensor) -> Tensor:
        """Return the tables of blocks with roots [B, 4 / V, V, V]."""
        tables = torch.empty(len(roots), _TABLE, dtype=torch.uint8, device=values.device)
        grid = roots.shape[0] * roots.shape[1] * (STATES // 256), 1, 1
        load(*tables_variant(self.shift, self.weights))(grid, 256, values, roots, tables)
        return tables

    def __call__(self, name: str, *args: object) -> None:
        kernel = load(*variant(name, self.shift, self.weights, self.room))
        table = kept(self.shift, self.room) * (_TABLE // _UNITS)
        shared = table + 4 * (STATES >> self.shift) + _SMALL
        kernel((self.blocks, 1, 1), _THREADS, *args, shared=shared)

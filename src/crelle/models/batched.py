"""One pass of a model over tokens of many sequences at once, with keys and values in shared pages.

    tokens     of sequence a: 1      of b: 1      of c: 5 of its prompt       N = 7 rows [N, width]
    products   all rows at once: a weight is read once for the whole batch
    attention  sequence by sequence, each over its own pages (View)
    head       only for the rows that are wanted: those from which a token is drawn

The layers are the model's own; what is written anew here is the order in which they are called, because positions are
given token by token and because of `exact`.

exact   A token's numbers do not depend, to the last bit, on what else is in the pass: not on other sequences, not on
        how its prompt was cut, not on whether it was drawn here or is run over again after a preemption. Only rows go
        together that are computed by the same instructions in the same order whatever their number:
            products      the C++ kernels have two paths, for fewer than 24 rows and (AMX tiles) for more, which
                          differ in the last bits; rows go in portions of 16. Other kernels always get 16 rows, some
                          of them 0: torch takes another path for each small number of rows.
            activations   torch's exp is one function within a vector register and another one for the rest of a
                          thread's share; rows go in portions without a rest and for one thread
            attention     each token by itself
            positions     cos and sin from a table that is made in blocks of fixed size, for the same reason
        The default on a CPU. What it costs is in docs/engine.md. Elsewhere rows go together as they come.
C++     Where a model has the fused step (crelle.models.fused), one call runs all of this for up to 16 tokens, of one
        sequence or of many. A row of it has the same bits in any company; a whole prompt as one call is computed by
        other tiles and has others. So with `exact` prompts go 16 tokens at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.formats.kv import KVPages
from crelle.kernels import cpu
from crelle.kernels import kv as paged
from crelle.kernels.cpu.fused_decoder import MAX_ROWS, Paged
from crelle.kernels.cpu.fused_decoder import FusedDecoder as Decoder
from crelle.models.linear import QuantLinear
from crelle.models.llama import Llama
from crelle.models.loader import Model
from crelle.models.opt import ACTIVATIONS, OPT
from crelle.models.rope import Rope
from crelle.models.steps import FIRST

ROWS = 16  # of a portion of an exact product
_SERIAL = 16384  # elements that torch leaves to one thread: gelu shares out more, other activations from 32768 on
_LANES = 64  # a multiple of what torch takes at once of any dtype
_BLOCK = 1024  # positions by which the table of angles grows


def page_dtype(model: Model) -> torch.dtype:
    """Return what pages of 16 bits hold: f16 where the C++ step reads them, else the model's dtype.

    A step of many texts reads keys and values once for each of them, so that their bytes are its time.
    """
    return torch.float16 if isinstance(getattr(model, "decoder", None), Decoder) else model.dtype


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Where the tokens of one pass find the keys and values of their sequences: what models know as a cache."""

    layers: Sequence[KVPages]
    table: Tensor  # int32 [B, max_pages]: the pages of each sequence
    starts: Sequence[int]  # B+1 numbers: tokens starts[b] … starts[b+1]-1 of the pass belong to sequence b
    before: Sequence[int]  # tokens that each sequence has in its pages already
    centers: Sequence[Tensor | None]  # of each layer's keys
    exact: bool = True
    _reads: tuple[Tensor, list[int], list[int]] = field(init=False)  # table, lengths and starts of `attend`

    def __post_init__(self) -> None:
        counts = [end - begin for begin, end in pairwise(self.starts)]
        if self.exact:  # every token reads as if it were the only one of its sequence
            table = self.table.repeat_interleave(torch.tensor(counts, device=self.table.device), 0)  # [N, max_pages]
            reads = table, [p + 1 for p in self.positions], list(range(1 + self.starts[-1]))
        else:
            reads = self.table, [b + n for b, n in zip(self.before, counts, strict=True)], list(self.starts)
        object.__setattr__(self, "_reads", reads)

    @property
    def positions(self) -> list[int]:
        """Where each token of the pass stands in its sequence."""
        spans = zip(self.before, pairwise(self.starts), strict=True)
        return [before + i for before, (begin, end) in spans for i in range(end - begin)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """Store k and v [N, Hkv, D]; return what q [N, H, D] sees."""
        pages = self.layers[layer]
        paged.append(k, v, pages, self.table, self.before, starts=self.starts, center=self.centers[layer])
        table, lengths, starts = self._reads
        return paged.attend(q, pages, table, lengths, starts=starts, window=window)


class Batched:
    """A model that runs over a batch of sequences; it shares all weights with the model it is made of."""

    def __init__(self, model: Model, *, exact: bool | None = None, core: bool = True) -> None:
        """Wrap a model; core: let C++ do all of a step where it can."""
        self.model = model
        self.exact = model.device.type == "cpu" if exact is None else exact
        self._multiply = exact_product if self.exact else QuantLinear.forward
        self.decoder: Decoder | None = None  # all of a step in C++
        if core and isinstance(model, Llama) and isinstance(model.decoder, Decoder) and (self.exact or model.coded):
            self.decoder = model.decoder

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int], view: View, wanted: Sequence[int]) -> Tensor:
        """Return logits f32 [len(wanted), V] of the tokens with these indices; all others only leave keys and values.

        All of `tokens` [N] are stored behind what their sequences have in the view's pages.
        """
        device = self.model.device
        ids, at = torch.tensor(tokens, device=device), torch.tensor(view.positions, device=device)
        rows = torch.tensor(wanted, dtype=torch.long, device=device)
        if self.decoder is not None:
            return self._in_core(self.decoder, ids, at, view, wanted)
        run = self._opt if isinstance(self.model, OPT) else self._llama
        return run(ids, at, view, rows).float()

    def _in_core(self, decoder: Decoder, ids: Tensor, at: Tensor, view: View, wanted: Sequence[int]) -> Tensor:
        """The same in C++: up to 16 tokens, of whatever sequences, are a call; unless `exact`, so is a portion."""
        layers, centers = view.layers, [c for c in view.centers if c is not None]
        spans = list(enumerate(pairwise(view.starts)))
        logits, row = torch.empty(len(wanted), decoder.vocabulary), {i: row for row, i in enumerate(wanted)}
        order: list[tuple[int, int]] = []  # (token, its sequence), those of a sequence one behind the other
        for b, (begin, end) in spans:
            if self.exact or end - begin < 2:
                order += [(i, b) for i in range(begin, end)]
                continue
            pages = Paged(layers, view.table[b : b + 1].contiguous(), centers)
            last = not any(i in row for i in range(begin, end - 1))
            found = decoder.prefill(ids[begin:end], int(at[begin]), pages, last=last)
            for i, one in zip(range(end - len(found), end), found, strict=True):
                if i in row:
                    logits[row[i]] = one
        for begin in range(0, len(order), MAX_ROWS):
            which, owners = (list(part) for part in zip(*order[begin : begin + MAX_ROWS], strict=True))
            seats = {b: seat for seat, b in enumerate(dict.fromkeys(owners))}
            pages = Paged(layers, view.table[list(seats)], centers)
            drawn = [j for j, i in enumerate(which) if i in row]
            rows, want = torch.tensor([seats[b] for b in owners]), torch.tensor(drawn, dtype=torch.long)
            found = decoder.step(ids[which], at[which], pages, rows=rows, want=want)
            if len(which) == len(ids) and [which[j] for j in drawn] == list(wanted):
                return found  # one call was all: what most steps are
            for j, one in zip(drawn, found, strict=True):
                logits[row[which[j]]] = one
        return logits

    def _llama(self, ids: Tensor, at: Tensor, view: View, wanted: Tensor) -> Tensor:
        model, multiply = self.model, self._multiply
        N, H, D = len(ids), model.c.heads, model.c.head_size
        cos, sin = self._angles.at(at)  # [N, 1, D]
        x = model.embedding(ids)  # [N, width]
        for i, layer in enumerate(self._layers):
            a, h = layer.attention, layer.norm_attention(x)
            q, k, v = (multiply(p, h).view(N, -1, D) for p in (a.q_proj, a.k_proj, a.v_proj))  # [N, heads, D]
            if a.q_norm is not None and a.k_norm is not None:
                q, k = a.q_norm(q), a.k_norm(k)
            y = view.attend(i, Rope.turn(q, cos, sin), Rope.turn(k, cos, sin), v, a.window)
            x = x + multiply(a.o_proj, y.reshape(N, H * D))
            h = layer.norm_mlp(x)
            x = x + multiply(layer.down, self._activate(F.silu, multiply(layer.gate, h)) * multiply(layer.up, h))
        return multiply(model.head, model.norm(x[wanted]))  # type: ignore[operator]

    def _opt(self, ids: Tensor, at: Tensor, view: View, wanted: Tensor) -> Tensor:
        model, multiply = self.model, self._multiply
        assert isinstance(model, OPT)
        N, D, begin, finish = len(ids), model.c.head_size, model.begin, model.finish
        x = model.embedding(ids)  # [N, words]
        x = x if begin.project_in is None else multiply(begin.project_in, x)
        x = x + begin.positions(at + FIRST)  # [N, width]
        for i, layer in enumerate(self._layers):
            a, h = layer.attention, layer.norm_attention(x) if layer.norm_first else x
            q, k, v = (multiply(p, h).view(N, -1, D) for p in (a.q_proj, a.k_proj, a.v_proj))
            x = x + multiply(a.out_proj, view.attend(i, q, k, v).reshape(N, -1))
            x = x if layer.norm_first else layer.norm_attention(x)
            h = layer.norm_mlp(x) if layer.norm_first else x
            x = x + multiply(layer.fc2, self._activate(ACTIVATIONS[model.c.activation], multiply(layer.fc1, h)))
            x = x if layer.norm_first else layer.norm_mlp(x)
        x = x[wanted]
        x = x if finish.norm is None else finish.norm(x)
        x = x if finish.project_out is None else multiply(finish.project_out, x)
        return multiply(model.head, x)

    def _activate(self, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return exact_elementwise(f, x) if self.exact else f(x)

    @cached_property
    def _layers(self) -> list[Any]:
        return list(self.model.layers)

    @cached_property
    def _angles(self) -> "_Angles":
        assert not isinstance(self.model, OPT)
        return _Angles(self.model.c.rope, self.model.dtype, self.model.device)


class _Angles:
    """cos and sin of all positions so far asked for, in whole blocks."""

    def __init__(self, rope: Rope, dtype: torch.dtype, device: torch.device) -> None:
        self._rope, self._dtype, self._device = rope, dtype, device
        self._table: tuple[Tensor, Tensor] | None = None  # [positions, 1, D] each

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        table = self._table  # once: another thread may put another one in its place, which need not be as long
        need = int(positions.max()) + 1
        if table is None or need > len(table[0]):
            blocks = [torch.arange(at, at + _BLOCK, device=self._device) for at in range(0, need, _BLOCK)]
            found = [self._rope.angles(block, self._dtype) for block in blocks]
            table = self._table = torch.cat([cos for cos, _ in found]), torch.cat([sin for _, sin in found])
        cos, sin = table
        return cos[positions], sin[positions]


def exact_product(linear: QuantLinear, x: Tensor) -> Tensor:
    """Return linear(x) for x [M, K], each row with the bits that it has in any other batch."""
    kernel, data = linear.prepared.kernel, linear.prepared.data
    y = x.new_empty(len(x), linear.problem.N)  # [M, N]
    if linear.kernel == "dense" and isinstance(data, Tensor) and _in_core(x, data):
        cpu.core().dense_matmul(x.contiguous().numpy(), data, y.numpy())  # row by row at heart
        return y if linear.bias is None else y + linear.bias
    whole = linear.kernel in ("cpu", "cpu-int8")  # any number of rows up to ROWS takes the same path
    for at in range(0, len(x), ROWS):
        rows = x[at : at + ROWS]
        missing = 0 if whole else ROWS - len(rows)
        y[at : at + ROWS] = kernel.run(F.pad(rows, (0, 0, 0, missing)) if missing else rows, data)[: len(rows)]
    return y if linear.bias is None else y + linear.bias


def _in_core(x: Tensor, w: Tensor) -> bool:
    plain = x.dtype == w.dtype == torch.float32 and x.device.type == w.device.type == "cpu"
    return plain and cpu.available() is None and w.is_contiguous()


def exact_elementwise(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return f(x) for x [M, N], each row with the bits that it has in any other batch."""
    M, N = x.shape
    portion = max(1, _SERIAL // N) if N % _LANES == 0 else 1
    return f(x) if portion >= M else torch.cat([f(x[at : at + portion]) for at in range(0, M, portion)])

"""Launches integer_encode.cu: residual add, norm or activation, and quantization of x for the next integer GEMM.

    xs, x = encode(x, form, "RMS_NORM", norm, addend=y)          # x += y; norm; integers for integer_gemm.product
    xs, _ = encode(inner, form, "SILU_MUL")
    each, x = encode_each(x, plan, "RMS_NORM", norm)             # of several weights: once for each order of inputs

The integers are those of crelle.formats.activations, bit by bit.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, get_args

import torch
from torch import Tensor

from crelle.errors import UnsupportedError
from crelle.formats.activations import ActivationSpec, least_and_top
from crelle.formats.grouped import GroupedTensor
from crelle.formats.two_level import TwoLevelTensor
from crelle.formats.wrappers.hadamard import block_size
from crelle.kernels.cuda.integer.integer_x import IntegerX
from crelle.kernels.cuda.launch import ADDRESS, Launch, can_bind, load
from crelle.kernels.cuda.planes.bmma_gemv import C_TYPES
from crelle.kernels.cuda.runtime.plans import Plans
from crelle.kernels.cuda.step.activations import Prologue, is_gated, width

if TYPE_CHECKING:
    from crelle.kernels.cuda.step.fused_linear import Norm

BLOCK = 128  # normal channels and outliers are padded to a multiple of this
ROWS = 8  # so are rows
ROTATED_GROUPS = (32, 64, 128)  # whose maxima are found by shuffles, and that can be rotated; others: shared memory
_ROW, _ANY = -1, 0  # one scale for a row and one for its outliers; other groups
_WARPS = {True: 16, False: 8}  # of a thread block that has a whole row, and of one that has 2048 places of it
_MOST = 8 * 256 * _WARPS[True]  # places of a row
MOST_PERMUTED = 2**15 - 8
_ROOM = 96 * 1024  # bytes of shared memory


@dataclass(frozen=True, slots=True, eq=False)
class EncodeForm:
    """How a weight wants its input."""

    K: int
    outliers: int  # of the weight: channels that have a padded block of their own
    activation: ActivationSpec
    perm: Tensor | None  # int16 [places]: which input stands where, K rounded up to 8 for padding; None: as they come
    order: bytes  # a digest of it, to compare on the host
    plans: Plans = field(default_factory=Plans, init=False, repr=False)

    @property
    def normal(self) -> int:
        return self.K - self.outliers

    @property
    def places(self) -> int:
        return sum(-(-n // BLOCK) * BLOCK for n in (self.normal, self.outliers))

    @property
    def split(self) -> int:
        """Where the outliers of the activations begin."""
        return self.K - self.activation.outliers

    @property
    def group(self) -> int:
        return min(self.activation.group, max(1, self.K))

    @property
    def groups(self) -> int:
        return -(-self.split // self.group) + -(-(self.K - self.split) // self.group)

    @property
    def kind(self) -> tuple[int, int, ActivationSpec, bool]:
        """All that one launch has for all its orders."""
        return self.K, self.outliers, self.activation, self.perm is None

    def shares(self, other: "EncodeForm") -> bool:
        """Whether one encoded input serves both."""
        return self.kind == other.kind and self.order == other.order


def form_of(w: GroupedTensor | TwoLevelTensor) -> EncodeForm:
    """Return how w wants its input, its order on w's device."""
    s, act = w.sizes, w.activation
    assert act is not None, "activations that are not quantized"
    if act.outlier_bits == 16 and act.outliers:
        raise UnsupportedError("kernel 'cuda-integer' takes outlier channels of 8 bits, not of 16")
    form = EncodeForm(s.K, s.outliers, act, None, b"")
    if w.perm is None:
        return form
    if s.K > MOST_PERMUTED:
        raise UnsupportedError(f"kernel 'cuda-integer' permutes rows of up to {MOST_PERMUTED} inputs, not of {s.K}")
    perm = torch.full((form.places,), -(-s.K // 8) * 8, dtype=torch.int16, device=w.perm.device)
    perm[: s.normal] = w.perm[: s.normal].to(torch.int16)
    perm[form.places - -(-s.outliers // BLOCK) * BLOCK :][: s.outliers] = w.perm[s.normal :].to(torch.int16)
    digest = hashlib.blake2b(w.perm.cpu().numpy().tobytes(), digest_size=16).digest()
    return EncodeForm(s.K, s.outliers, act, perm, digest)


def supports(K: int, outliers: int, groups: int) -> str | None:
    """Return None, or why rows of K inputs cannot be encoded."""
    places = -(-(K - outliers) // BLOCK) * BLOCK + -(-outliers // BLOCK) * BLOCK
    if places > _MOST:
        return f"takes rows of up to {_MOST} inputs, not of {K}"
    if 2 * K + 32 + 4 * groups > _ROOM:
        return f"takes rows of {K} inputs in larger groups than these"
    return None


def variant(form: EncodeForm, op: Prologue, dtype: torch.dtype) -> tuple[str, str]:
    group, whole, _, times = _shape(form, op)
    permuted = form.perm is not None
    aligned = form.K % 8 == 0 and (permuted or form.normal % 8 == 0)
    flags = ", ".join(str(f).lower() for f in (form.activation.hadamard, permuted, aligned))
    return (
        "integer/integer_encode.cu",
        f"crelle::integer_encode<crelle::{op}, {group}, {flags}, {_WARPS[whole]}, {times}, {C_TYPES[dtype]}>",
    )


def _shape(form: EncodeForm, op: Prologue) -> tuple[int, bool, int, int]:
    """Return GROUP, whether a thread block has a whole row, the places that it has and how many times 8 a thread."""
    alike, act = form.outliers == form.activation.outliers, form.activation
    group = act.group if alike and act.group in ROTATED_GROUPS else _ANY
    if group == _ANY and act.group >= max(form.split, act.outliers):
        group = _ROW
    whole = group in (_ANY, _ROW) or form.perm is not None or "NORM" in op
    full = 256 * _WARPS[whole]
    times = -(-form.places // full) if whole else 1
    return group, whole, form.places if whole else full, max(times, 1)


def encode(
    x: Tensor,
    form: EncodeForm,
    op: Prologue = "PLAIN",
    norm: "Norm | None" = None,
    addend: Tensor | None = None,
    tokens: int | None = None,
) -> tuple[IntegerX, Tensor]:
    """Return op(x + addend) as integers, and x + addend, for x [M, K] (gated: [M, 2K]).

    `tokens`: so many rows are to be multiplied, M or more; those behind M hold anything.
    """
    (xs,), total = _launch(x, form, form.perm, 1, op, norm, addend, tokens)
    return xs, total


class EncodePlan:
    """The launches that encode an input for several weights, and what each weight takes of them."""

    def __init__(self, forms: Sequence[EncodeForm]) -> None:
        self.launches: list[_Orders] = []
        self.taken: list[tuple[int, int]] = []  # launch, order, of each weight
        for form in forms:
            at = next((i for i, some in enumerate(self.launches) if some.form.kind == form.kind), len(self.launches))
            if at == len(self.launches):
                self.launches.append(_Orders(form))
            self.taken.append((at, self.launches[at].index(form)))


class _Orders:
    """Forms of a kind, by their orders."""

    def __init__(self, form: EncodeForm) -> None:
        self.form, self._known = form, [form]

    def index(self, form: EncodeForm) -> int:
        for i, known in enumerate(self._known):
            if known.order == form.order:
                return i
        self._known.append(form)
        return len(self._known) - 1

    def __len__(self) -> int:
        return len(self._known)

    @cached_property
    def perms(self) -> Tensor | None:
        perms = [known.perm for known in self._known if known.perm is not None]
        return torch.stack(perms) if len(perms) > 1 else perms[0] if perms else None


def encode_each(
    x: Tensor,
    plan: EncodePlan,
    op: Prologue = "PLAIN",
    norm: "Norm | None" = None,
    addend: Tensor | None = None,
    tokens: int | None = None,
) -> tuple[list[IntegerX], Tensor]:
    """Return the same for each weight of a plan: one launch where they differ in their orders at most."""
    found, total = list[list[IntegerX]](), x
    for i, some in enumerate(plan.launches):
        each, total = _launch(total, some.form, some.perms, len(some), op, norm, None if i else addend, tokens)
        found.append(each)
    return [found[i][order] for i, order in plan.taken], total


class _Buffers(NamedTuple):
    codes: Tensor  # int8 [orders, Mp, places]
    scales: Tensor  # f32 [orders, C, Mp]


def _launch(
    x: Tensor,
    form: EncodeForm,
    perms: Tensor | None,
    orders: int,
    op: Prologue,
    norm: "Norm | None",
    addend: Tensor | None,
    tokens: int | None,
) -> tuple[list[IntegerX], Tensor]:
    M, K = x.shape[0], form.K
    assert x.shape[1] == K * width(op)
    assert addend is None or (addend.is_contiguous() and not is_gated(op))
    x, tokens = x.contiguous(), M if tokens is None else tokens
    rows = -(-tokens // ROWS) * ROWS
    made = _Buffers(
        torch.empty(orders, rows, form.places, dtype=torch.int8, device=x.device),
        torch.empty(orders, form.groups, rows, dtype=torch.float32, device=x.device),
    )
    total = x if addend is None else torch.empty_like(x)
    each = [IntegerX(codes, scales, tokens, x.dtype) for codes, scales in zip(*made, strict=True)]
    if M == 0:
        return each, total
    weight, shift, eps = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
    plan = _plan(form, op, x.dtype, M, rows, orders)
    tensors = (x, addend, weight, shift, perms, None if addend is None else total, *made)
    load(*plan.variant)(plan.grid, plan.threads, *tensors, *plan.sizes, float(eps), shared=plan.shared, pdl=True)
    return each, total


class _Plan(NamedTuple):
    """A launch of integer_encode.cu but for its tensors and eps."""

    variant: tuple[str, str]
    grid: tuple[int, int, int]
    threads: int
    sizes: tuple[int | float, ...]
    shared: int


def _plan(form: EncodeForm, op: Prologue, dtype: torch.dtype, M: int, rows: int, orders: int) -> _Plan:
    key = (op, dtype, M, rows, orders)
    found: _Plan | None = form.plans.get(key)
    if found is None:
        act = form.activation
        group, whole, part, _ = _shape(form, op)
        least, top = least_and_top(act.bits)
        tail = max(1, block_size(form.normal % act.block))
        held = 16 * (-(-form.K // 8) + 1) if form.perm is not None else 0
        sizes = (form.K, form.normal, form.split, rows, form.groups, form.group, tail, part)
        found = form.plans[key] = _Plan(
            variant(form, op, dtype),
            (M, -(-form.places // part), orders),
            32 * _WARPS[whole],
            (*sizes, tail**-0.5, act.clip / top, float(least), float(top)),
            held + (4 * form.groups if group == _ANY else 0),
        )
    return found


def bind(form: EncodeForm, dtype: torch.dtype, M: int) -> Launch | None:
    """Return the launch that encodes M rows, given the addresses of x, codes and scales; None if not on a GPU."""
    plan = _plan(form, "PLAIN", dtype, M, -(-M // ROWS) * ROWS, 1)
    kernel = load(*plan.variant)
    if not can_bind(kernel):
        return None
    tensors = (ADDRESS, None, None, None, form.perm, None, ADDRESS, ADDRESS)
    return kernel.bind(plan.grid, plan.threads, *tensors, *plan.sizes, 0.0, shared=plan.shared, pdl=True)


@dataclass(frozen=True, slots=True)
class _Case:
    """What CI compiles."""

    K: int
    group: int
    outliers: int = 128
    permuted: bool = True
    ops: Sequence[Prologue] = field(default=get_args(Prologue))


def variants() -> Iterator[tuple[str, str]]:
    """Return what CI compiles."""
    norms: tuple[Prologue, ...] = ("RMS_NORM", "LAYER_NORM")
    few: tuple[Prologue, ...] = ("PLAIN", *norms, "SILU_MUL", "GELU")
    cases = [_Case(4096, 128), _Case(11008, 128, permuted=False), _Case(4096, 4096, 0, ops=few)]
    cases += [_Case(11008, 11008, 128, False, few), _Case(8192, 64, 64, ops=norms), _Case(4096, 128, 0, False, norms)]
    cases += [_Case(16384, 128, ops=norms), _Case(28672, 128, ops=norms), _Case(28672, 28672, ops=few)]
    cases += [_Case(333, 32, 20, ops=few), _Case(333, 48, 20, False, few), _Case(28672, 256, ops=few)]
    for i, case in enumerate(cases):
        rotated = case.group in ROTATED_GROUPS and i != 1
        act = ActivationSpec((4, 8, 3)[i % 3], case.group, case.outliers, hadamard=rotated)
        perm = torch.empty(0, dtype=torch.int16) if case.permuted else None
        form = EncodeForm(case.K, case.outliers, act, perm, b"")
        for j, op in enumerate(case.ops):
            yield variant(form, op, (torch.float16, torch.bfloat16)[(i + j) % 2])

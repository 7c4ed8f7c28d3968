"""Keys and values of the tokens so far: as floats in one block per layer, or in pages of 8 to 2 bits.

A forward pass first grows the cache, then attends layer by layer, then advances it. `attend` stores the new keys and
values and lets the new tokens look at all that is stored; a model need not know the format.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from crelle.errors import CapacityError, FormatError
from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels import reference_attention as paged
from crelle.kernels.cpu.fused_decoder import Paged
from crelle.kernels.reference_attention import ATTEND_ALL, AttendOptions
from crelle.kernels.spec import RopeSpec
from crelle.models.rope import angles, rotate

if TYPE_CHECKING:
    from crelle.models.decoder import DecoderModel

_STEP = 256  # tokens by which a cache grows
CENTER_SAMPLE = 256  # random tokens from which the centres of keys are found
_HORIZON = 4096  # positions for which they are meant
_OF_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What a cache is allocated for."""

    layers: int
    batch: int
    heads: int  # of keys and values
    head_size: int
    context: int
    dtype: torch.dtype
    device: torch.device


class KVCache:
    """K and V [B, Hkv, S, D] for every layer, as floats."""

    def __init__(self, sizes: CacheSizes) -> None:
        self.length, self.context = 0, sizes.context
        # per layer [2, B, Hkv, capacity, D]: keys, then values
        shape = 2, sizes.batch, sizes.heads, 0, sizes.head_size
        self.layers = [torch.empty(shape, dtype=sizes.dtype, device=sizes.device)] * sizes.layers

    def grow(self, more: int) -> None:
        """Make room for `more` tokens, or say that the context is full."""
        have = self.layers[0].shape[3]
        if room := _room(have, self.length + more, self.context):
            for i, kv in enumerate(self.layers):  # one by one: what a layer had is free before the next one grows
                self.layers[i] = torch.cat([kv, kv.new_empty(*kv.shape[:3], room - have, kv.shape[4])], 3)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v [B, T, Hkv, D] behind what is there; return all of the layer's keys and values."""
        end = self.length + k.shape[1]
        kv = self.layers[layer]
        kv[0, :, :, self.length : end] = k.transpose(1, 2)
        kv[1, :, :, self.length : end] = v.transpose(1, 2)
        return kv[0, :, :, :end], kv[1, :, :, :end]

    def stored(self) -> list[Tensor]:
        """Return all layers, as the C++ step takes them."""
        return self.layers

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttendOptions = ATTEND_ALL) -> Tensor:
        """Store k and v [B, T, Hkv, D]; return what q [B, T, H, D] sees, in q's shape."""
        return attention(q, *self.append(layer, k, v), how)

    def advance(self, tokens: int) -> None:
        self.length += tokens


class PagedCache:
    """The same in pages of any KVFormat (reference_attention): page i of sequence b is page i*B + b."""

    def __init__(self, fmt: KVFormat, sizes: CacheSizes, centers: list[Tensor] | None = None) -> None:
        """Begin empty; centers: of each layer's keys, f32 [Hkv, D], where the format has them."""
        self.format, self.batch, self.length, self.context = fmt, sizes.batch, 0, sizes.context
        each = sizes.heads, sizes.head_size, sizes.dtype, sizes.device
        self.layers = [KVPages.new(own, 0, *each) for own in fmt.layers(sizes.layers)]
        self.table = torch.empty(sizes.batch, 0, dtype=torch.int32)
        self.centers = key_centers_of(centers, self.layers)

    @property
    def nbytes(self) -> int:
        return sum(pages.nbytes for pages in self.layers)

    def grow(self, more: int) -> None:
        """Make room for `more` tokens, or say that the context is full."""
        page, have = self.format.page, self.table.shape[1]
        if room := _room(have * page, self.length + more, self.context):
            need = -(-room // page)
            self.layers = [pages.grown((need - have) * self.batch) for pages in self.layers]
            self.table = torch.arange(need * self.batch, dtype=torch.int32).view(need, self.batch).T.contiguous()

    def stored(self) -> Paged:
        """Return all layers, as the C++ step takes them."""
        return Paged(self.layers, self.table, self.centers)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttendOptions = ATTEND_ALL) -> Tensor:
        """Store k and v [B, T, Hkv, D]; return what q [B, T, H, D] sees, in q's shape."""
        pages, before = self.layers[layer], [self.length] * self.batch
        k, v, flat = k.flatten(0, 1), v.flatten(0, 1), q.flatten(0, 1)  # [B*T, heads, D]
        paged.append(k, v, pages, self.table, before, center=self.centers[layer])
        after = [self.length + q.shape[1]] * self.batch
        options = {"window": how.window, "softcap": how.softcap, "sinks": how.sinks}
        return paged.attend(flat, pages, self.table, after, **options).view(q.shape)  # type: ignore[arg-type]

    def advance(self, tokens: int) -> None:
        self.length += tokens


Cache = KVCache | PagedCache


def key_centers_of(centers: Sequence[Tensor] | None, layers: Sequence[KVPages]) -> list[Tensor | None]:
    """Return what each layer's keys are stored relative to: its centre where its format asks for one."""
    if centers is None:
        assert not any(pages.format.center for pages in layers), "a format with centres needs those of the model"
        return [None] * len(layers)
    return [c if pages.format.center else None for c, pages in zip(centers, layers, strict=True)]


def _room(have: int, need: int, context: int) -> int | None:
    """Return to how many tokens a cache should grow, None where it need not."""
    if need > context:
        raise CapacityError(f"{need} tokens do not fit the model's context of {context}")
    return min(context, max(2 * have, -(-need // _STEP) * _STEP)) if need > have else None


def attention(q: Tensor, k: Tensor, v: Tensor, how: AttendOptions = ATTEND_ALL) -> Tensor:
    """Return what the last T of S tokens see: q [B, T, H, D], k and v [B, Hkv, S, D] -> [B, T, H, D]."""
    mask, causal = visible(q.shape[1], k.shape[2], how.window, q.device)
    gqa = q.shape[2] != k.shape[1]
    if not how.plain:
        return _attention(q, k, v, mask, causal, how)
    # cuDNN builds a graph for every number of keys, and each token of a decode has another one.
    with sdpa_kernel(_OF_ANY_LENGTH) if q.is_cuda and q.shape[1] == 1 else nullcontext():
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, is_causal=causal, enable_gqa=gqa)
    return y.transpose(1, 2)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, how: AttendOptions) -> Tensor:
    """The same with capped scores or with sinks, which torch's attention does not have."""
    R = q.shape[2] // k.shape[1]
    k, v = k.repeat_interleave(R, 1), v.repeat_interleave(R, 1)
    score = q.transpose(1, 2) @ k.mT * q.shape[-1] ** -0.5  # [B, H, T, S]
    score = score if how.softcap is None else how.softcap * torch.tanh(score / how.softcap)
    if causal:
        mask = torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    if how.sinks is not None:
        sinks = how.sinks.to(score.dtype)[:, None, None].expand(*score.shape[:-1], 1)
        score = torch.cat([score, sinks], -1)
    weight = score.float().softmax(-1).to(v.dtype)
    y: Tensor = weight[..., : k.shape[2]] @ v
    return y.transpose(1, 2)


def visible(T: int, S: int, window: int | None, device: torch.device) -> tuple[Tensor | None, bool]:
    """Which of S cached tokens each of the last T may see: (bool [T, S] or None for all, plainly causal or not)."""
    if window is None or window >= S:
        if T == 1:
            return None, False
        if T == S:
            return None, True
    query = torch.arange(S - T, S, device=device)[:, None]
    key = torch.arange(S, device=device)
    seen = key <= query
    return (seen if window is None else seen & (key > query - window)), False


@torch.inference_mode()
def key_centers(model: "DecoderModel") -> list[Tensor]:
    """Return for each layer a vector f32 [Hkv, D] around which its keys lie, found with random tokens.

    Any vector is right, for softmax does not see it (crelle.formats.kv.pages); a good one leaves less to quantize. A
    soft cap and sinks do see it: layers that have one keep their keys as they are.
    Before rope, keys of all positions have one mean. Rope rotates it with the position: slowly in the pairs of channels
    that keep a mean, quickly in those where the average over positions is about 0, so this takes the average. The first
    token is left out: many models have it take the attention that nothing else wants, with a key of its own kind.
    """
    spec, tokens = model.spec, min(CENTER_SAMPLE, model.spec.context)
    ids = torch.randint(spec.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache()
    assert isinstance(cache, KVCache)
    model(ids.to(model.device), cache, last=True)
    keys = [kv[0, 0, :, :tokens].transpose(0, 1).float() for kv in cache.layers]  # [T, Hkv, D]
    for i, k in enumerate(keys):
        if not k.isfinite().all():
            raise FormatError(
                f"{model.build.weights.path}: the keys of layer {i} are not finite, so that they have no centre for a "
                "cache of 8 bits or fewer; the checkpoint is damaged, or its activations overflow"
            )
    return [
        torch.zeros_like(k[0]) if a.sinks or a.softcap is not None else key_center(k, a.rope, spec.context)
        for k, a in zip(keys, spec.attentions, strict=True)
    ]


def key_center(k: Tensor, rope: RopeSpec | None, context: int) -> Tensor:
    """Return the center of keys [T, Hkv, D] at positions 0, 1, …"""
    first = min(1, len(k) - 1)
    if rope is None:
        return k[first:].mean(0)
    cos, sin = angles(rope, torch.arange(len(k), device=k.device), torch.float32)
    mean = rotate(k, cos, -sin)[first:].mean(0)  # before rope
    cos, sin = angles(rope, torch.arange(min(_HORIZON, context), device=k.device), torch.float32)
    return rotate(mean, cos.mean(0), sin.mean(0))

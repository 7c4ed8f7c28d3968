"""CrelleCache: keys and values of past tokens in 8 to 2 bits, for `generate(past_key_values=…)` of any model.

The codes are those of crelle.formats.kv.pages (rotated, keys centred), token by token, without its pages: keys and
values are kept as codes uint8 [B, H, S, row] with words int16 [B, H, S, C]. Each step dequantizes what attention reads,
layer by layer. Keys are centred on the mean of the first tokens that a layer sees, if there are enough of them: the
centre only has to be the same for all tokens, not to be exact.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, get_layer_types_and_kwargs

from crelle.errors import UnsupportedError
from crelle.formats.kv.pages import KVCode, KVFormat, dequantize, hadamard, quantize

_ENOUGH = 16  # tokens whose mean is a centre


class _Coded:
    """Keys or values of one layer."""

    def __init__(self, code: KVCode, head_size: int, dtype: torch.dtype, center: Tensor | None) -> None:
        self.code, self.head_size, self.dtype, self.center = code, head_size, dtype, center
        self.stored: tuple[Tensor, ...] = ()  # codes and words, or floats where the format keeps them: [B, H, S, …]

    def append(self, x: Tensor) -> None:
        new: tuple[Tensor, ...] = (x,)
        if self.code.coded:
            x = x.float() if self.center is None else x.float() - self.center
            new = quantize(hadamard(x, self.code), self.code.bits, self.code.groups(self.head_size))
        self.stored = tuple(torch.cat(both, 2) for both in zip(self.stored, new, strict=True)) if self.stored else new

    def read(self) -> Tensor:
        """Return [B, H, S, D] as attention wants it."""
        if not self.code.coded:
            return self.stored[0]
        codes, words = self.stored
        x = hadamard(dequantize(codes, words, self.code.bits, head_size=self.head_size), self.code)
        return (x if self.center is None else x + self.center).to(self.dtype)

    def change(self, f: Callable[[Tensor], Tensor]) -> None:
        self.stored = tuple(map(f, self.stored))

    def __len__(self) -> int:
        return self.stored[0].shape[2] if self.stored else 0


class CrelleCacheLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer; `keys` and `values` of the base class stay empty."""

    def __init__(self, fmt: KVFormat) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.format = fmt
        self.coded: tuple[_Coded, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        center = None
        if self.format.center and key_states.shape[2] >= _ENOUGH:
            center = key_states.float().mean((0, 2), keepdim=True)  # [1, H, 1, D]
        made = []
        for kind, x in enumerate((key_states, value_states)):
            self.format.check(x.shape[-1])
            made.append(_Coded(self.format.code(kind), x.shape[-1], x.dtype, None if kind else center))
        self.coded = tuple(made)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values and return all, the new ones too, as they are stored."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for coded, x in zip(self.coded, (key_states, value_states), strict=True):
            coded.append(x)
        keys, values = (coded.read() for coded in self.coded)
        return keys, values

    def get_seq_length(self) -> int:
        return len(self.coded[0]) if self.coded else 0

    def nbytes(self) -> int:
        return sum(t.nbytes for coded in self.coded for t in coded.stored)

    def change(self, f: Callable[[Tensor], Tensor]) -> None:
        """Apply f to all that is stored, each [B, H, S, …]."""
        for coded in self.coded:
            coded.change(f)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: as many as a negative number says, or all behind a positive one."""
        now = self.get_seq_length()
        keep = min(now, tokens_to_remove) if tokens_to_remove > 0 else max(0, now + tokens_to_remove)
        self.change(lambda t: t[:, :, :keep])

    def reset(self) -> None:
        self.coded, self.is_initialized = (), False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.change(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.change(lambda t: t[indices])

    def offload(self) -> None:
        self.change(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self.change(lambda t: t.to(self.device, non_blocking=True))


class CrelleSlidingLayer(CrelleCacheLayer):  # type: ignore[no-untyped-call]
    """A layer that attends to the last `window` tokens: those before are dropped."""

    is_sliding = True

    def __init__(self, fmt: KVFormat, window: int) -> None:
        super().__init__(fmt)
        self.sliding_window, self.cumulative_length = window, 0

    # What transformers asks of a window depends on these two numbers alone.
    get_mask_sizes = DynamicSlidingWindowLayer.get_mask_sizes
    get_max_length = DynamicSlidingWindowLayer.get_max_length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.cumulative_length += key_states.shape[2]
        keys, values = super().update(key_states, value_states)
        self.change(lambda t: t[:, :, -self.sliding_window + 1 :])
        return keys, values

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        if self.cumulative_length >= self.sliding_window:
            raise UnsupportedError("a window's cache has dropped the tokens that it would need to forget the last ones")
        super().crop(tokens_to_remove)
        self.cumulative_length = len(self.coded[0])

    def reset(self) -> None:
        super().reset()
        self.cumulative_length = 0


class CrelleCache(Cache):
    """A cache for `model.generate(…, past_key_values=CrelleCache(model.config, "4"))`.

    kv: a KVFormat or its short string: 8, 4, 3, 2, k4v2, kv4:group=64, 4,layers.0=8 (docs/notes/kv.md).
    """

    def __init__(self, config: Any, kv: str | int | KVFormat = 4) -> None:
        self.format = KVFormat.parse(kv)
        kinds, settings = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        window: int = settings.get("sliding_window", 0)
        if other := sorted(set(kinds) - {"full_attention", "sliding_attention", "chunked_attention"}):
            raise UnsupportedError(f"CrelleCache stores keys and values; a layer of '{other[0]}' has others")
        formats = self.format.layers(len(kinds))
        super().__init__(
            layers=[
                CrelleCacheLayer(f) if kind == "full_attention" else CrelleSlidingLayer(f, window)
                for kind, f in zip(kinds, formats, strict=True)
            ]
        )

    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return sum(layer.nbytes() for layer in self.layers if isinstance(layer, CrelleCacheLayer))

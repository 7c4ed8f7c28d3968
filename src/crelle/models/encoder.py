"""The torch forward of an encoder: the layers of a decoder (crelle.models.decoder), attending in both directions.

Texts of different lengths are one batch: shorter ones are padded, and `Padded` lets no token see the padding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crelle.kernels.reference_attention import ATTEND_ALL, AttendOptions
from crelle.models.builder import Builder
from crelle.models.decoder import PLAIN, InputLayer, Layer
from crelle.models.families.base import Architecture
from crelle.models.linear import QuantEmbedding, QuantLinear


class Padded:
    """Attention of B sequences of at most T tokens over all their tokens."""

    def __init__(self, lengths: Tensor | None, T: int, device: torch.device | str) -> None:
        """Lengths [B]; None: all have T tokens."""
        self.mask: Tensor | None = None  # bool [B, 1, 1, T], true where there is a token
        if lengths is not None:
            self.mask = (torch.arange(T, device=device) < lengths.to(device)[:, None])[:, None, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttendOptions = ATTEND_ALL) -> Tensor:
        """Return what q [B, T, H, D] sees of k and v [B, T, Hkv, D]; encoders have neither windows nor caps."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, self.mask).transpose(1, 2)


class EncoderModel(nn.Module):
    """An encoder that runs."""

    def __init__(self, build: Builder, arch: Architecture) -> None:
        super().__init__()
        s = arch.spec
        self.spec, self.dtype, self.device = s, build.dtype, build.device
        table = build.matrix(arch.names.embedding, s.vocabulary, s.embedding_width)
        self.embedding, self.input = QuantEmbedding(table, build.dtype), InputLayer(build, arch)
        self.layers = nn.ModuleList(Layer(build, arch, i) for i in range(len(s.layers)))

    @torch.inference_mode()
    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return states [B, T, width] of ids [B, T]; those of padding, past a text's `lengths` [B], mean nothing."""
        T = ids.shape[1]
        x = self.input(self.embedding(ids), torch.arange(T, device=ids.device), PLAIN)
        cache = Padded(lengths, T, ids.device)
        for layer in self.layers:
            x = layer(x, None, cache, PLAIN)
        return x  # type: ignore[no-any-return]

    def linears(self) -> list[QuantLinear]:
        """All linear layers, in the order in which they run."""
        return [m for m in self.modules() if isinstance(m, QuantLinear)]

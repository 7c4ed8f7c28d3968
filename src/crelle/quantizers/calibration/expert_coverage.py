"""How often calibration text reaches each expert, and which further sequences reach those that it misses.

Tokens are counted in the full-precision model, in one pass over the sequences to calibrate on and as many others of the
text. Of these, greedily, the sequence is added that brings the most tokens to experts that have fewer than ENOUGH,
until all have them, none brings any, or half as many sequences were added as there were.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from crelle.quantizers.calibration.layer_api import CalibrationModel, Progress, TrainableLinear, half_products

ENOUGH = 32  # tokens of an expert, from which on more text is not looked for


@dataclass(frozen=True, slots=True)
class ExpertTokens:
    """Tokens that an expert takes of the calibration text, in the full-precision model."""

    least: int
    median: int
    most: int
    unreached: int  # experts without any
    added: int  # sequences that were added to the text for the experts that it reached rarely


@dataclass(frozen=True, slots=True)
class Coverage:
    """The sequences to add, and what the calibration text is with them."""

    added: list[int]  # of the further sequences
    experts: ExpertTokens


def cover_experts(
    model: CalibrationModel,
    tokens: Tensor,
    more: Tensor,
    *,
    device: torch.device,
    batch: int,
    enough: int = ENOUGH,
    progress: Progress | None = None,
) -> Coverage:
    """Choose from further sequences [M, T] for the experts that `tokens` [S, T] reach rarely."""
    counts = count_tokens(model, torch.cat([tokens, more]), device=device, batch=batch, progress=progress)
    added = choose_sequences(counts[:, : len(tokens)].sum(1), counts[:, len(tokens) :], len(tokens) // 2, enough)
    with_added = torch.cat([counts[:, : len(tokens)], counts[:, [len(tokens) + i for i in added]]], 1).sum(1)
    least, most, middle = int(with_added.min()), int(with_added.max()), int(with_added.median())
    return Coverage(added, ExpertTokens(least, middle, most, int((with_added == 0).sum()), len(added)))


@torch.no_grad()
def count_tokens(
    model: CalibrationModel, tokens: Tensor, *, device: torch.device, batch: int, progress: Progress | None = None
) -> Tensor:
    """Return how many tokens of each of the sequences [S, T] each expert of each layer takes: int64 [experts, S]."""
    T, parts = tokens.shape[1], torch.split(tokens, batch)
    kept = torch.bfloat16 if device.type == "cuda" else torch.float32  # as calibration keeps hidden states
    states = [model.embed(part.to(device)).cpu().to(kept) for part in parts]
    model.drop_tables()
    counts: list[Tensor] = []
    for i in range(model.layers):
        block = model.block(i)
        if device.type == "cuda" and i + 1 < model.layers:
            model.read_ahead(i + 1)
        taken: dict[str, list[Tensor]] = {}
        here: dict[str, Tensor] = {}  # rows of the batch, by expert
        for stage in block.stages():
            linear = block.linears()[stage[0]]
            linear.watch = partial(_note, here, linear)
        for j, x in enumerate(states):
            with half_products(device):
                states[j] = block(x.to(device, torch.float32)).cpu().to(kept)
            for expert, rows in here.items():
                taken.setdefault(expert, []).append(torch.bincount(rows // T, minlength=len(x)).cpu())
        counts += [torch.cat(each) for each in taken.values()]
        if progress:
            progress(i + 1, model.layers, "counting tokens of experts")
    return torch.stack(counts)


def _note(here: dict[str, Tensor], linear: TrainableLinear, _: Tensor) -> None:
    if linear.rows is not None:  # else all tokens pass it
        here[linear.name.rpartition(".")[0]] = linear.rows


def choose_sequences(have: Tensor, more: Tensor, limit: int, enough: int = ENOUGH) -> list[int]:
    """Return columns of `more` [experts, M] that bring tokens to experts that have too few, best first."""
    need, more = (enough - have).clamp(min=0), more.clone()
    chosen: list[int] = []
    while len(chosen) < min(limit, more.shape[1]) and need.any():
        gain = torch.minimum(more, need[:, None]).sum(0).numpy()
        best = int(gain.argmax())
        if not gain[best]:
            break
        chosen.append(best)
        need = (need - more[:, best]).clamp(min=0)
        more[:, best] = 0
    return chosen

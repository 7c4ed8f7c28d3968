"""KL divergence between two next-token distributions over the same windows, streamed: KL(reference || model) in nats.

Perplexities of near models scatter, because errors cancel in them; divergences do not. Top-1 agreement is the share of
tokens after which both find the same token the likeliest.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from crelle.engine.llm import LLM
from crelle.errors import SchemeError
from crelle.eval.perplexity import Perplexity, Windows, check_finite, exp_of_loss, window_logits

Progress = Callable[[int, int, str], None]
_ROWS = 64  # whose log-probabilities are computed in f64 at one time


@dataclass(slots=True)
class Divergences:
    """What was found so far; each window is forgotten once it was compared."""

    kl: list[Tensor] = field(default_factory=list)  # f64 [T] each
    same: int = 0  # tokens after which the likeliest token is the same
    losses: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of the reference and of the model, summed

    @property
    def values(self) -> Tensor:
        """All divergences [predicted]."""
        return torch.cat(self.kl)

    @property
    def predicted(self) -> int:
        return sum(map(len, self.kl))

    @property
    def perplexities(self) -> tuple[float, float]:
        """Of the reference and of the model."""
        reference, model = (exp_of_loss(loss / self.predicted) for loss in self.losses)
        return reference, model

    def add(self, reference: Tensor, model: Tensor, targets: Tensor) -> None:
        """Compare logits [T, V] of both; targets [T] are the tokens that follow."""
        for at in range(0, len(targets), _ROWS):
            rows = slice(at, at + _ROWS)
            p, q = (x[rows].to(targets.device).double().log_softmax(-1) for x in (reference, model))
            for i, x in enumerate((p, q)):
                self.losses[i] -= x.gather(1, targets[rows, None]).sum().item()
            self.same += int((p.argmax(-1) == q.argmax(-1)).sum())
            self.kl.append((p.exp() * (p - q)).sum(-1).clamp(min=0).cpu())


def divergences(
    windows: Windows,
    reference: Callable[[Tensor], Tensor],
    model: Callable[[Tensor], Tensor],
    progress: Progress | None = None,
) -> Divergences:
    """Compare two functions from a window [1, T] to its logits [1, T, V]."""
    found = Divergences()
    if progress:
        progress(0, windows.count, windows.extent)
    for i, window in enumerate(windows):
        found.add(reference(window)[0, :-1], model(window)[0, :-1], window[0, 1:])
        check_finite(sum(found.losses), sum(found.losses), i, windows.count)
        if progress:
            progress(i + 1, windows.count, f"KL {found.values.mean().item():.4f}")
    return found


@dataclass(frozen=True, slots=True)
class ModelDivergence:
    """How far a model is from a reference; divergences in nats."""

    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    perplexity: float  # of the reference
    ratio: float  # of the model's perplexity to it
    predicted: int  # tokens whose distributions were compared


def model_divergence(
    llm: LLM,
    reference: LLM,
    text: str,
    *,
    context: int = 2048,
    tokens: int | None = None,
    bos: bool = True,
    progress: Progress | None = None,
) -> tuple[Perplexity, ModelDivergence]:
    """Return a model's perplexity and its divergence from a reference; options as those of `perplexity`."""
    cut = Windows.of(llm, text, context=context, tokens=tokens, bos=bos)
    same = Windows.of(reference, text, context=context, tokens=tokens, bos=bos)
    sizes = llm.model.spec.vocabulary, reference.model.spec.vocabulary
    if (cut.ids, cut.start) != (same.ids, same.start) or sizes[0] != sizes[1]:
        raise SchemeError(
            f"{llm.weights.path} and {reference.weights.path} do not share a tokenizer (vocabularies of {sizes[0]} and "
            f"{sizes[1]}), so that their distributions cannot be compared; take the model that it was quantized from"
        )
    found = divergences(
        cut,
        lambda window: window_logits(reference, window.to(reference.model.device), reference.kv, context),
        lambda window: window_logits(llm, window, llm.kv, context),
        progress,
    )
    kl, (theirs, ours) = found.values, found.perplexities
    return cut.result(ours, llm), ModelDivergence(
        kl_mean=kl.mean().item(),
        kl_p99=kl.quantile(0.99).item(),
        kl_max=kl.max().item(),
        top1_agreement=found.same / found.predicted,
        perplexity=theirs,
        ratio=ours / theirs,
        predicted=found.predicted,
    )

"""What a quantized cache changes: KL(16 bits || coded) of the next token's distribution, token by token.

Both passes run over the same windows (crelle.eval.perplexity). In the coded one every token reads keys and values from
the pages, its own among them, as they are when tokens are generated. The divergence (crelle.eval.divergence) is what a
cache is gated by.
"""

from collections.abc import Callable
from dataclasses import dataclass

from crelle.engine.llm import LLM
from crelle.eval.divergence import divergences
from crelle.eval.perplexity import Windows, window_logits
from crelle.formats.kv.pages import KVFormat


@dataclass(frozen=True, slots=True)
class KVDivergence:
    """A cache beside one of 16 bits; divergences in nats."""

    kv: str
    bits_per_value: float  # mean of all layers, scales and zeros counted
    kl_mean: float
    kl_p99: float
    kl_max: float
    perplexity: float
    perplexity_16: float
    ratio: float
    tokens: int  # that were evaluated: those of the text in full windows
    predicted: int  # tokens whose distributions were compared
    windows: int
    context: int
    bos: bool
    text_tokens: int  # of the whole text


def kv_divergence(
    llm: LLM,
    text: str,
    *,
    context: int = 2048,
    tokens: int | None = None,
    bos: bool = True,
    stepwise: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> KVDivergence:
    """Compare the cache that a model was loaded with to one of 16 bits; options as those of `perplexity`."""
    cut = Windows.of(llm, text, context=context, tokens=tokens, bos=bos)
    found = divergences(
        cut,
        lambda window: window_logits(llm, window, KVFormat(), context),
        lambda window: window_logits(llm, window, llm.kv, 1 if stepwise else context),
        progress,
    )
    kl, (perplexity_16, perplexity) = found.values, found.perplexities
    spec = llm.model.spec
    each = [own.bits_per_value(spec.head_size) for own in llm.kv.layers(len(spec.layers))]
    return KVDivergence(
        kv=str(llm.kv),
        bits_per_value=sum(each) / len(each),
        kl_mean=kl.mean().item(),
        kl_p99=kl.quantile(0.99).item(),
        kl_max=kl.max().item(),
        perplexity=perplexity,
        perplexity_16=perplexity_16,
        ratio=perplexity / perplexity_16,
        tokens=cut.tokens,
        predicted=len(kl),
        windows=cut.count,
        context=context,
        bos=bool(cut.start),
        text_tokens=cut.text_tokens,
    )


def above_limit(found: KVDivergence, limit: float) -> str | None:
    """Return None, or the sentence that says by how much the mean divergence is above a limit."""
    if found.kl_mean <= limit:
        return None
    return (
        f"the cache {found.kv} has a mean KL divergence of {found.kl_mean:.3g} nats from the 16-bit cache, above the "
        f"limit of {limit:g}; give it more bits, or give more bits to some layers (4,layers.0=8)"
    )

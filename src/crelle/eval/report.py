"""One model measured whole: size, perplexity, speed, a sample of its text; and the plot of several."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from crelle.engine.llm import LLM
from crelle.engine.sampling.sampler import Sampling
from crelle.plots import pyplot

_FAR = 8  # times the least perplexity: what lies above is drawn at the edge


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report."""

    scheme: str
    bits_per_weight: float
    megabytes: float  # the whole model on disk
    perplexity: float
    tokens_per_second: float
    quantize_seconds: float
    sample: str

    @classmethod
    def of(
        cls, llm: LLM, scheme: str, bits_per_weight: float, perplexity: float, quantize_seconds: float, prompt: str
    ) -> "Row":
        """Generate with the model that was evaluated, and take its speed and its size on disk."""
        llm.generate(prompt, Sampling(max_tokens=4))  # the first call pays for what is set up lazily
        said = llm.generate(prompt, Sampling(max_tokens=48))
        path = llm.weights.path
        files = [path] if path.is_file() else list(path.iterdir())
        megabytes = sum(f.stat().st_size for f in files) / 1e6
        return cls(scheme, bits_per_weight, megabytes, perplexity, said.tokens_per_second, quantize_seconds, said.text)


def alternating_speeds(models: Sequence[LLM], prompt: str, tokens: int = 32, rounds: int = 3) -> list[float]:
    """Return the tokens per second of each model: the median of some rounds, alternating, after a warm-up."""
    seen: list[list[float]] = [[] for _ in models]
    for warm_up in (True, *[False] * rounds):
        for llm, values in zip(models, seen, strict=True):
            said = llm.generate(prompt, Sampling(max_tokens=4 if warm_up else tokens))
            values.extend([] if warm_up else [said.tokens_per_second])
    return [median(values) for values in seen]


@dataclass(frozen=True, slots=True)
class Point:
    """A model to compare with."""

    scheme: str
    bits_per_weight: float
    perplexity: float


def plot_perplexity(rows: Sequence[Row], path: Path, title: str, compared: Sequence[Point] = ()) -> None:
    """Plot perplexity over bits per weight; the unquantized model is the dashed line, others are single points.

    Points far above the unquantized model stand at the upper edge, with an arrow and their value.
    """
    plt = pyplot()
    plain = [r for r in rows if r.bits_per_weight >= 16]
    small = sorted((r for r in rows if r.bits_per_weight < 16), key=lambda r: r.bits_per_weight)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    least = min(r.perplexity for r in rows)
    top = max([_FAR * least, *(1.5 * r.perplexity for r in small)])
    axes.plot([r.bits_per_weight for r in small], [r.perplexity for r in small], "o-", color="#1f5fa8", label="Crelle")
    for r in small:
        _label(axes, r, r.perplexity, (0, -24), "#1f5fa8")
    for p in compared:
        at = min(p.perplexity, 0.75 * top)
        axes.plot(p.bits_per_weight, at, "s" if at == p.perplexity else "^", color="#d98032")
        _label(axes, p, at, (0, 6), "#a05a1a")
    for r in plain:
        axes.axhline(r.perplexity, linestyle="--", color="#888888")
        axes.annotate(
            f"{r.scheme}: {r.perplexity:.1f}",
            (0.02, r.perplexity),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            color="#555555",
        )
    axes.set(xlabel="bits per weight (scales counted)", ylabel="perplexity (log scale)", yscale="log", title=title)
    axes.set_ylim(0.6 * least, top)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.22)
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _label(axes: Any, point: Row | Point, height: float, offset: tuple[int, int], colour: str) -> None:
    """Write a point's scheme, without what tells settings of its search apart, and its perplexity beside it."""
    scheme = point.scheme.removesuffix(",refine=0")
    axes.annotate(
        f"{scheme}\n{point.perplexity:,.1f}",
        (point.bits_per_weight, height),
        xytext=offset,
        textcoords="offset points",
        ha="center",
        fontsize=7,
        color=colour,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.5},  # lines pass behind it
    )

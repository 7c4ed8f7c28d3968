"""One model measured whole: size, perplexity, speed, a sample of its text; and the plot of several."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crelle.engine.llm import LLM
from crelle.engine.sampler import Sampling
from crelle.plots import pyplot


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


@dataclass(frozen=True, slots=True)
class Point:
    """A model to compare with."""

    scheme: str
    bits_per_weight: float
    perplexity: float


def plot_perplexity(rows: Sequence[Row], path: Path, title: str, compared: Sequence[Point] = ()) -> None:
    """Plot perplexity over bits per weight; the unquantized model is the dashed line, others are single points."""
    plt = pyplot()
    plain = [r for r in rows if r.bits_per_weight >= 16]
    small = sorted((r for r in rows if r.bits_per_weight < 16), key=lambda r: r.bits_per_weight)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot([r.bits_per_weight for r in small], [r.perplexity for r in small], "o-", color="#1f5fa8", label="Crelle")
    for p in compared:
        axes.plot(p.bits_per_weight, p.perplexity, "s", color="#d98032")
        _label(axes, p, (6, 4), "left", "#a05a1a")
    middle = sum(r.bits_per_weight for r in small) / max(1, len(small))
    for r in small:
        right = r.bits_per_weight > middle  # labels stay inside the picture and off the falling line
        _label(axes, r, (-10, -24) if right else (6, -24), "right" if right else "left", "black")
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
    axes.margins(x=0.25, y=0.18)
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _label(axes: Any, point: Row | Point, offset: tuple[int, int], side: str, colour: str) -> None:
    axes.annotate(
        f"{point.scheme}\n{point.perplexity:.1f}",
        (point.bits_per_weight, point.perplexity),
        xytext=offset,
        textcoords="offset points",
        ha=side,
        fontsize=8,
        color=colour,
    )

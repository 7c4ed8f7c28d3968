"""The search's front as a plot and as one HTML page that needs nothing from outside: curve, map of the bits, table."""

import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crelle.plots import COLOURS, pyplot
from crelle.quantizers.base import BitConfig
from crelle.quantizers.search.bit_allocation import Plan, kind_of

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 340, 70, 46  # of the curve, in pixels


@dataclass(frozen=True, slots=True)
class ParetoPlot:
    """What there is to show."""

    title: str
    plans: Sequence[Plan]  # the front, from small to large
    chosen: Plan
    uniforms: Mapping[BitConfig, Plan]  # one setting for all matrices, to compare with
    perplexities: Mapping[float, float]  # of the plans that were tried, by bits per weight
    full: float | None = None  # perplexity of the model as it is, where plans were tried

    def measured(self) -> dict[float, float]:
        """Return losses above 0 of the plans that were tried, in nats above the model as it is, by bits per weight."""
        full = self.full
        if full is None:
            return {}
        return {bits: math.log(p / full) for bits, p in sorted(self.perplexities.items()) if p > full}

    def rows(self) -> list[tuple[Plan, bool]]:
        """The front with the chosen plan among it, each with whether it is the chosen one."""
        others = [(p, False) for p in self.plans if p.choices != self.chosen.choices]
        return sorted([*others, (self.chosen, True)], key=lambda row: row[0].bits_per_weight)


def plot_pareto(path: Path, plot: ParetoPlot) -> None:
    """Plot predicted loss over bits per weight as PNG."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    shown = _shown(plot.plans)
    axes.plot([p.bits_per_weight for p in shown], [p.loss for p in shown], color=COLOURS[0], label="best plans")
    for i, (setting, p) in enumerate(_shown_uniforms(plot.uniforms).items()):
        axes.plot(p.bits_per_weight, p.loss, "o", color=COLOURS[2], ms=4, label="" if i else "one setting for all")
        axes.annotate(str(setting), (p.bits_per_weight, p.loss), xytext=(4, 4), textcoords="offset points", fontsize=7)
    if tried := plot.measured():
        axes.plot(list(tried), list(tried.values()), "s--", color="#444444", mfc="none", ms=6, lw=1, label="measured")
    if plot.chosen.loss > 0:
        axes.plot(plot.chosen.bits_per_weight, plot.chosen.loss, "D", color=COLOURS[0], ms=8, label="chosen")
    if shown:
        axes.set_yscale("log")
    axes.set(xlabel="bits per weight (scales counted)", ylabel="loss, nats (log scale)", title=plot.title)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def html_page(plot: ParetoPlot) -> str:
    """Return the whole result as one HTML page, in light and dark."""
    chosen = plot.chosen
    title = html.escape(plot.title)
    tried = "".join(f" Perplexity {v:.3f}." for bits, v in plot.perplexities.items() if bits == chosen.bits_per_weight)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{title}</h1>
<p>Chosen: <b>{chosen.bits_per_weight:.3f} bits per weight</b>, every scale counted; predicted loss {chosen.loss:.4g};
recipe <code>{html.escape(str(chosen.recipe))}</code> with bits and group for each matrix.{tried}</p>
<h2>Best plan at each size</h2>
{_curve(plot)}
<h2>Bits of each matrix in the chosen plan</h2>
{_heat_map(chosen)}
<h2>The front</h2>
{_table(plot)}
</body></html>
"""


_STYLE = """
:root{color-scheme:light dark;--ink:#1d2126;--paper:#fff;--faint:#d5d9de;--line:#1f5fa8;--dot:#c46a1b}
@media(prefers-color-scheme:dark){:root{--ink:#e4e7ea;--paper:#15181c;--faint:#3a4148;--line:#6ba7ec;--dot:#e79a55}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
svg{max-width:100%;height:auto}svg text{fill:var(--ink);font:11px system-ui,sans-serif}
.grid{stroke:var(--faint)}.curve{stroke:var(--line);fill:none;stroke-width:2}.best{fill:var(--line)}.dot{fill:var(--dot)}
.measured{fill:none;stroke:var(--ink);stroke-width:2}
.cell text{fill:#fff;text-anchor:middle}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .8rem;border-bottom:1px solid var(--faint);text-align:right}
tr.chosen{font-weight:bold}
"""


def _shown(plans: Sequence[Plan]) -> list[Plan]:
    return [p for p in plans if p.loss > 0]  # a logarithm's worth


def _shown_uniforms(uniforms: Mapping[BitConfig, Plan]) -> dict[BitConfig, Plan]:
    return {s: p for s, p in uniforms.items() if p.loss > 0}


def _curve(plot: ParetoPlot) -> str:
    shown, uniforms = _shown(plot.plans), _shown_uniforms(plot.uniforms)
    points, tried = [*shown, *uniforms.values()], plot.measured()
    if not points:
        return "<p>No plan loses anything.</p>"
    left, right = (f(p.bits_per_weight for p in points) for f in (min, max))
    losses = [*(p.loss for p in points), *tried.values()]
    low, high = math.floor(math.log10(min(losses))), math.ceil(math.log10(max(losses)))
    high = max(high, low + 1)

    def x(bits: float) -> float:
        return _LEFT + (bits - left) / max(1e-9, right - left) * (_WIDTH - _LEFT - 40)

    def y(loss: float) -> float:
        return 12 + (high - math.log10(loss)) / (high - low) * (_HEIGHT - _BOTTOM - 12)

    parts = []
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>')
    for tick in _ticks(left, right):
        parts.append(f'<text x="{x(tick):.1f}" y="{_HEIGHT - 26}" text-anchor="middle">{tick:g}</text>')
    line = " ".join(f"{x(p.bits_per_weight):.1f},{y(p.loss):.1f}" for p in shown)
    parts.append(f'<polyline class="curve" points="{line}"/>')
    for setting, p in uniforms.items():
        place = f'cx="{x(p.bits_per_weight):.1f}" cy="{y(p.loss):.1f}"'
        parts.append(f'<circle class="dot" {place} r="4"><title>all matrices {setting}: {_words(p)}</title></circle>')
    for bits, loss in tried.items():
        place = f'x="{x(bits) - 4:.1f}" y="{y(loss) - 4:.1f}" width="8" height="8"'
        parts.append(f'<rect class="measured" {place}><title>measured: {bits:.3f} bits, loss {loss:.4g}</title></rect>')
    if plot.chosen.loss > 0:
        place = f'cx="{x(plot.chosen.bits_per_weight):.1f}" cy="{y(plot.chosen.loss):.1f}"'
        parts.append(f'<circle class="best" {place} r="7"><title>chosen: {_words(plot.chosen)}</title></circle>')
    middle = (_LEFT + _WIDTH) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">bits per weight; predicted loss upwards (log); '
        "line: best plans, small dots: one setting for all, squares: measured, large dot: chosen</text>"
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="front">{"".join(parts)}</svg>'


def _ticks(left: float, right: float) -> list[float]:
    step = next((s for s in (0.1, 0.25, 0.5, 1.0) if (right - left) / s <= 10), 1.0)
    return [i * step for i in range(math.ceil(left / step), math.floor(right / step) + 1)]


def _words(p: Plan) -> str:
    return f"{p.bits_per_weight:.3f} bits, loss {p.loss:.4g}"


def _heat_map(plan: Plan) -> str:
    """One column a layer, one row a kind; colour and label are the bits, the group shows on pointing."""
    places = {module: (_layer_of(module), kind_of(module)) for module in plan.choices}
    layers, kinds = (
        list(dict.fromkeys(p[0] for p in places.values())),
        list(dict.fromkeys(p[1] for p in places.values())),
    )
    cell, left = 26, 90
    parts = [f'<text x="{left - 8}" y="{40 + cell * k}" text-anchor="end">{html.escape(kind)}</text>'
             for k, kind in enumerate(kinds)]  # fmt: skip
    parts += [f'<text x="{left + cell * (i + 0.5)}" y="16" text-anchor="middle">{html.escape(layer)}</text>'
              for i, layer in enumerate(layers)]  # fmt: skip
    for module, setting in plan.choices.items():
        column, row = layers.index(places[module][0]), kinds.index(places[module][1])
        parts.append(
            f'<g class="cell" transform="translate({left + cell * column},{22 + cell * row})">'
            f'<rect width="{cell - 1}" height="{cell - 1}" fill="{_colour(setting.bits)}"/>'
            f'<text x="{cell / 2}" y="17">{setting.bits:g}</text>'
            f"<title>{html.escape(module)}: {setting}</title></g>"
        )
    width, height = left + cell * len(layers), 30 + cell * len(kinds)
    svg = f'<svg viewBox="0 0 {width} {height}" style="min-width:{width}px" role="img" aria-label="bits">'
    return f'<div class="scroll">{svg}{"".join(parts)}</svg></div>'


def _layer_of(module: str) -> str:
    index = re.search(r"\.(\d+)\.", module)
    return index[1] if index else "–"


def _colour(bits: float) -> str:
    """From blue (few) over violet to red (many)."""
    return f"hsl({215 + 20 * (bits - 1)} 55% {36 + 2 * bits}%)"


def _table(plot: ParetoPlot) -> str:
    rows = []
    for p, chosen in plot.rows():
        mark = ' class="chosen"' if chosen else ""
        tried = plot.perplexities.get(p.bits_per_weight)
        cells = [f"{p.bits_per_weight:.3f}", f"{p.loss:.4g}", "" if tried is None else f"{tried:.3f}", mixture(p)]
        rows.append(f"<tr{mark}>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    heads = "".join(f"<th>{h}</th>" for h in ("bits per weight", "predicted loss (nats)", "perplexity", "matrices"))
    return f"<table><tr>{heads}</tr>{''.join(rows)}</table>"


def mixture(plan: Plan) -> str:
    """Say how many matrices have how many bits: 2×120 3×90."""
    bits = [s.bits for s in plan.choices.values()]
    return " ".join(f"{b}-bit×{bits.count(b)}" for b in sorted(set(bits)))

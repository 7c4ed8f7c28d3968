"""crelle inspect: the matrices of a checkpoint, their formats and sizes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.measure import Measurement

from crelle.cli.common.console import Json, Model, Terminal, draw_whole, out, print_json, tracking, warn
from crelle.errors import SchemeError

if TYPE_CHECKING:
    from crelle.formats.base import QuantTensor

Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Plot the range and the bits of every group of inputs to this PNG file."),
]

All = Annotated[bool, typer.Option("--all", help="Show one row per matrix instead of one per kind of matrix.")]

NAME = "inspect"


def run(model: Model, every: All = False, plot: Plot = None, json: Json = False) -> None:
    """Show a model's matrices, their formats and their size: one row per kind of matrix, or all with `--all`.

    The bits per weight at the end include scales, zero points, and the weights of the layers that cannot be quantized.
    The embedding and the head are listed, but not counted.

    **Example**: `crelle inspect out/smollm2-3bit`

    **Example**: `crelle inspect out/smollm2-mixed --plot groups.png`
    """
    if plot is not None:
        _check_plot(plot)
    from crelle.cli.views.inspect_table import kinds, single, table

    facts = describe(model)
    facts |= {"kinds": kinds(facts["layers"])}
    if plot is not None:
        _draw(model, plot)
    if json:
        print_json(facts)
        return
    if every:  # names are not cut, however narrow the terminal is
        shown = table(single(facts["layers"]), every=True)
        wide = Measurement.get(out, out.options.update(width=1 << 10), shown).maximum
        Terminal(width=max(out.width, wide)).print(shown)
    else:
        out.print(table(facts["kinds"]))
    out.print(
        f"{facts['scheme']}: {facts['bits_per_weight']:.3f} bits per weight over {facts['weights']:,} weights, "
        f"{facts['bytes'] / 1e6:.1f} MB; whole model {facts['file_bytes'] / 1e6:.1f} MB on disk",
        highlight=False,
        soft_wrap=True,
    )
    warn(facts["warnings"])
    if facts["precisions"]:
        choices = ", ".join(map(str, facts["precisions"]))
        out.print(f"Available precisions: {choices} bits; choose one with --bits.", highlight=False, soft_wrap=True)


def describe(model: Any) -> dict[str, Any]:
    """Return the facts that `inspect --json` prints."""
    from crelle.errors import FormatError
    from crelle.formats.base import bits_per_weight, nbytes
    from crelle.formats.storage.checkpoint import Checkpoint
    from crelle.formats.storage.open import matrices_of, open_weights, scheme_of
    from crelle.models.loader import in_usual_form
    from crelle.models.nested import offered
    from crelle.quantizers.unquantized import is_layer, sentences_about, unquantized

    weights = open_weights(model, encoded=True)
    modules = matrices_of(weights)
    layers: list[dict[str, Any]] = []
    quantized: list[str] = []
    for name in modules:
        w = weights.matrix(name)
        facts: dict[str, Any] = {"name": name, "format": w.format, "inner": _inner(w), "shape": list(w.shape)}
        facts |= {"bits": w.bits, "group": w.group}
        facts |= {"shares": _shares(w), "outliers": w.spec().get("outliers", 0), "activation": _activation(w)}
        layers.append({**facts, "bits_per_weight": bits_per_weight(w), "bytes": nbytes(w)})
        quantized += [name] if w.quantized else []
    if not layers:
        raise FormatError(f"{model} contains no matrix")
    chosen = [m for m in quantized if is_layer(m)] or quantized or modules
    counted = [x for x in layers if x["name"] in chosen]
    left = {n: weights.read(n) for n in unquantized(in_usual_form(weights))}
    count = sum(x["shape"][0] * x["shape"][1] for x in counted) + sum(t.numel() for t in left.values())
    size = sum(x["bytes"] for x in counted) + sum(t.nbytes for t in left.values())
    root = weights.path
    files = [root] if root.is_file() else [f for f in root.iterdir() if f.is_file()]
    return {
        "scheme": scheme_of(weights),
        "overrides": weights.quantization["overrides"] if isinstance(weights, Checkpoint) else {},
        "bits_per_weight": 8 * size / count,
        "bytes": size,
        "weights": count,
        "file_bytes": sum(f.stat().st_size for f in files),
        "precisions": list(offered(weights)),  # that --bits can ask for
        "notes": list(getattr(weights, "notes", ())),  # where an importer had to decide what the files mean
        "layers": layers,
        "unquantized": [{"name": n, "shape": list(t.shape), "bytes": t.nbytes} for n, t in left.items()],
        "warnings": list(sentences_about(in_usual_form(weights))),
    }


def _inner(w: "QuantTensor") -> str | None:
    """Return the format of the matrix that a format wraps, such as that behind a rotation."""
    from crelle.formats.wrappers.composite import WrappedTensor

    return w.inner.format if isinstance(w, WrappedTensor) else None


def _shares(w: "QuantTensor") -> dict[int, float]:
    """Return which share of a matrix's groups has how many bits, where they differ."""
    from crelle.formats.base import group_bits

    if (bits := group_bits(w)) is None:
        return {}
    return {b: float((bits == b).float().mean()) for b in sorted(set(bits.tolist()))}


def _activation(w: "QuantTensor") -> str | None:
    """Return how a matrix quantizes its input, e.g. int4/128+128: 4 bits in groups of 128, 128 outliers."""
    found = getattr(w, "activation", None)
    return None if found is None else f"{found}, clip {found.clip:g}" if found.clip != 1 else str(found)


def _check_plot(path: Path) -> None:
    """Refuse before the work what could not be written after it."""
    from crelle.plots import pyplot

    pyplot()
    if path.suffix.lower() != ".png":
        raise SchemeError(f"--plot must name a .png file, got '{path}'")
    if not path.parent.is_dir():
        raise SchemeError(f"--plot: directory {path.parent} does not exist")


def _draw(model: Path, path: Path) -> None:
    from crelle.cli.views.inspect_plot import by_layer, group_ranges, heat_map
    from crelle.formats.storage.open import matrices_of, open_weights

    weights = open_weights(model, encoded=True)
    names = by_layer(matrices_of(weights))
    rows = []
    with tracking("ranges") as track:
        for i, name in enumerate(names):
            track(i, len(names), name)
            if (w := weights.matrix(name)).quantized:
                rows.append(group_ranges(name, w))
    draw_whole(path, lambda made: heat_map(made, rows))

"""crelle inspect: the matrices of a checkpoint, their formats and sizes."""

from typing import TYPE_CHECKING, Any

from rich.table import Table

from crelle.cli.console import Json, Model, out, print_json

if TYPE_CHECKING:
    from crelle.formats.open import Weights

NAME = "inspect"


def run(model: Model, json: Json = False) -> None:
    """Show a model's matrices, their formats and their true size.

    Bits per weight count every scale and zero point of the quantized matrices; dense ones (embeddings, head) are
    listed, but not counted.

    **Example**: `crelle inspect out/smollm2-3bit`
    """
    facts = describe(model)
    if json:
        print_json(facts)
        return
    table = Table("matrix", "format", "outputs x inputs", "bits", "group", "bits/weight", "MB")
    for layer in facts["layers"]:
        N, K = layer["shape"]
        per_weight, megabytes = f"{layer['bits_per_weight']:.3f}", f"{layer['bytes'] / 1e6:.3f}"
        group = "several" if layer["group"] is None else str(layer["group"])
        cells = (layer["name"], layer["format"], f"{N} x {K}", f"{layer['bits']:g}", group)
        table.add_row(*cells, per_weight, megabytes)
    out.print(table)
    out.print(
        f"{facts['scheme']}: {facts['bits_per_weight']:.3f} bits per weight over {facts['weights']:,} weights, "
        f"{facts['bytes'] / 1e6:.1f} MB; whole model {facts['file_bytes'] / 1e6:.1f} MB on disk",
        highlight=False,
        soft_wrap=True,
    )
    if facts["precisions"]:
        choices = ", ".join(map(str, facts["precisions"]))
        out.print(f"serves {choices} bits from the same planes: choose with --bits", highlight=False, soft_wrap=True)


def describe(model: Any) -> dict[str, Any]:
    """Return the facts that `inspect --json` prints."""
    from crelle.errors import FormatError
    from crelle.formats.base import bits_per_weight, nbytes
    from crelle.formats.checkpoint import Checkpoint
    from crelle.formats.open import open_weights
    from crelle.models.nested import offered

    weights = open_weights(model, encoded=True)
    modules = [n.removesuffix(".weight") for n in weights.names() if len(weights.shape(n)) == 2]
    layers: list[dict[str, Any]] = []
    counted: list[dict[str, Any]] = []  # the quantized ones; all of them where there are none
    for name in modules:
        w = weights.matrix(name)
        facts = {"name": name, "format": w.format, "shape": list(w.shape), "bits": w.bits, "group": w.group}
        layers.append({**facts, "bits_per_weight": bits_per_weight(w), "bytes": nbytes(w)})
        if w.quantized:
            counted.append(layers[-1])
    if not layers:
        raise FormatError(f"{model} holds no matrix, so there is nothing to show")
    counted = counted or layers
    count = sum(x["shape"][0] * x["shape"][1] for x in counted)
    size = sum(x["bytes"] for x in counted)
    root = weights.path
    files = [root] if root.is_file() else [f for f in root.iterdir() if f.is_file()]
    return {
        "scheme": _scheme(weights),
        "overrides": weights.quantization["overrides"] if isinstance(weights, Checkpoint) else {},
        "bits_per_weight": 8 * size / count,
        "bytes": size,
        "weights": count,
        "file_bytes": sum(f.stat().st_size for f in files),
        "precisions": list(offered(weights)),  # that --bits can ask for
        "notes": list(getattr(weights, "notes", ())),  # where an importer had to decide what the files mean
        "layers": layers,
    }


def _scheme(weights: "Weights") -> str:
    from crelle.formats.checkpoint import Checkpoint
    from crelle.formats.importers.base import EncodedDirectory

    if isinstance(weights, Checkpoint):
        return weights.scheme
    return f"quantized by {weights.method}" if isinstance(weights, EncodedDirectory) else "not quantized by Crelle"

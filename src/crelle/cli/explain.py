"""crelle explain: which kernel multiplies by which matrix, and why not the others."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from crelle.cli.console import Device, Json, Model, out, print_json

if TYPE_CHECKING:
    from crelle.formats.open import Weights

NAME = "explain"


def run(
    model: Model,
    device: Device = "auto",
    kv: Annotated[str, typer.Option("--kv", help="Bits of the KV cache it is to run with: 16, 8 or 4.")] = "16",
    json: Json = False,
) -> None:
    """Print layer → kernel → why not the others.

    Nothing falls back silently to something slower or less exact: this is where one sees what runs. Pass one of the
    names as `--kernel` to `generate` or `eval` to insist on it.
    """
    from crelle.formats.kv import KVFormat
    from crelle.formats.open import open_weights
    from crelle.models.cache import why_not_fused
    from crelle.models.fused import why_not
    from crelle.models.loader import read_spec

    cache = KVFormat.parse(kv)
    rows = decisions(model, device)
    where = rows[0]["problem"]["device"]
    one_by_one = why_not(
        read_spec(open_weights(model, verify=False)),
        where,
        {row["kernel"] for row in rows},
        any(row["problem"]["permuted"] for row in rows),
    )
    one_by_one = one_by_one or why_not_fused(cache, where)
    if json:
        said = {"device": where, "kv": str(cache), "fused": one_by_one is None, "why_not_fused": one_by_one}
        print_json({**said, "layers": rows})
        return
    table = Table("matrices", "problem", "kernel", "why not the others")
    alike: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        why = "\n".join(f"{k}: {v}" for k, v in row["others"].items())
        alike.setdefault((row["describes"], row["kernel"], why), []).append(row["name"])
    for (problem, kernel, why), names in alike.items():
        shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more like it"
        table.add_row(shown, problem, kernel, why)
    out.print(table)
    fused = "in the fused C++ step: one call a token" if one_by_one is None else f"layer by layer: {one_by_one}"
    out.print(f"decoding runs {fused}", highlight=False, soft_wrap=True)


def decisions(model: Any, device: str) -> list[dict[str, Any]]:
    """Return for every matrix the kernel that would be chosen and what each other kernel says."""
    import torch

    from crelle.formats.open import open_weights
    from crelle.kernels.base import Problem
    from crelle.kernels.registry import explain, select
    from crelle.models.loader import choose_device
    from crelle.models.precisions import at_precision

    where = choose_device(device)
    dtype = torch.float32 if where.type == "cpu" else torch.float16
    weights = open_weights(model)
    rows = []
    for name, stored in _multiplied(weights).items():
        w = at_precision(weights.matrix(stored))
        problem = replace(Problem.of(w, dtype), device=where.type)
        chosen = select(problem).name
        others = {k: why or "could run it, but is less preferred" for k, why in explain(problem) if k != chosen}
        facts = {"format": w.format, "N": w.shape[0], "K": w.shape[1], "bits": w.bits, "group": w.group}
        facts |= {"permuted": problem.permuted, "device": where.type, "dtype": str(dtype).removeprefix("torch.")}
        rows.append(
            {
                "name": name,
                "problem": facts,
                "describes": str(problem),
                "kernel": chosen,
                "others": others,
            }
        )
    return rows


def _multiplied(weights: "Weights") -> dict[str, str]:
    """Return each layer that multiplies by a matrix, and where that is stored: a tied head is the embedding."""
    from crelle.models.loader import tied_to

    matrices = [n.removesuffix(".weight") for n in weights.names() if len(weights.shape(n)) == 2]
    found = {m: m for m in matrices if "embed" not in m}
    if tied := tied_to(weights):
        found["lm_head"] = tied
    return found

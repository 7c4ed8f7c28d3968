"""OUT/training.json and OUT/training.png: the training losses of a checkpoint."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crelle.cli.common.console import draw_whole, out


def draw_training(
    directory: Path,
    losses: Sequence[float],
    blocks: Mapping[str, Sequence[float | None]],
    seconds: float | None = None,
) -> None:
    """Write the losses of end-to-end and block-wise steps to a checkpoint; plot them if matplotlib is installed."""
    from crelle.errors import UnsupportedError
    from crelle.formats.storage.io import to_json, write_whole
    from crelle.formats.storage.ownership import TRAINING
    from crelle.plots import plot_training

    if not losses and not blocks:
        return
    found: dict[str, Any] = {"losses": _finite(losses)} | (
        {"blocks": {n: _finite(b) for n, b in blocks.items()}} if blocks else {}
    )
    found |= {} if seconds is None else {"seconds": seconds}
    write_whole(directory / TRAINING, to_json(found))
    try:
        draw_whole(directory / "training.png", lambda path: plot_training(path, losses, blocks))
    except UnsupportedError as e:
        out.print(f"training.png was not written: {e}", highlight=False)


def _finite(losses: Sequence[float | None]) -> list[float | None]:
    return [loss if loss is not None and math.isfinite(loss) else None for loss in losses]  # JSON has no infinity

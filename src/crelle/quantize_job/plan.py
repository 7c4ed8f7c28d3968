"""The plan of `auto`: searched for once, and kept beside OUT until the model is finished.

A search takes a good part of a run, and on a GPU a second one need not choose the same, with which the layers that are
already written would not agree. So the plan is a file, `OUT.plan.json`, from the end of the search to the end of the
run: written whole, then renamed, with what it was made from. `--resume` takes it if that is the same as now.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crelle.errors import FormatError
from crelle.formats.storage.io import read_json, to_json, write_whole, writing
from crelle.formats.storage.open import open_weights
from crelle.quantizers.calibration.layer_api import Progress
from crelle.quantizers.device_limit import device_limit
from crelle.quantizers.pipeline import Calibration, fingerprint_of
from crelle.quantizers.schemes.auto import Auto
from crelle.version import __version__

SUFFIX = ".plan.json"
_MARK = "planned_from"


def plan_file(out: Path) -> Path:
    """Return where the plan for OUT is kept."""
    return out.with_name(out.name + SUFFIX)


def refuse_other_file(out: Path) -> None:
    """Refuse a file under the plan's name that no run of ours wrote."""
    path = plan_file(out)
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or _MARK not in _read(path)):
        raise FormatError(
            f"{path} exists and is not the plan of an interrupted run, which would be written there; "
            "move it or choose another OUT"
        )


def planned(
    auto: Auto,
    source: str | Path,
    out: Path,
    calibration: Calibration,
    *,
    resume: bool,
    overwrite: bool,
    progress: Progress | None,
) -> dict[str, str]:
    """Return the scheme of every matrix, by module: as it is kept, or chosen now."""
    if not auto.search:
        return {}
    path, made_from = plan_file(out), _made_from(auto, source, calibration)
    if resume and path.is_file():
        kept = _read(path)
        if kept.get(_MARK) == made_from and isinstance(found := kept.get("overrides"), dict):
            return {str(module): str(scheme) for module, scheme in found.items()}
        if not overwrite:
            raise FormatError(
                f"cannot resume: {path} was written for another model, text or scheme; use the same ones, or "
                "`overwrite=True` to start over"
            )
    model = calibration.open(open_weights(source), calibration.device)
    with device_limit(calibration.device, calibration.memory):
        tell = None if progress is None else lambda done, total, what: progress(done, total, f"search, {what}")
        found = auto.plan(model, calibration.tokens, calibration.device, tell, calibration.memory)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_json({_MARK: made_from, "overrides": found}))
    return found


def forget_plan(out: Path) -> None:
    """Delete the plan of a run that is finished."""
    with writing(plan_file(out)):
        plan_file(out).unlink(missing_ok=True)


def _made_from(auto: Auto, source: str | Path, calibration: Calibration) -> Mapping[str, Any]:
    """Return what a plan depends on, as JSON gives it back."""
    return {
        "crelle": __version__,
        "source": fingerprint_of(open_weights(source)),
        "scheme": str(auto),
        "calibration": calibration.fingerprint(),
        "memory": calibration.memory,
    }


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object; what cannot be read is none of ours."""
    try:
        return read_json(path)
    except FormatError:
        return {}

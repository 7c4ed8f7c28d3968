"""The --calib option: calibration data for the schemes that need it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crelle.errors import SchemeError

if TYPE_CHECKING:
    from crelle.engine.calibration_data import CalibrationData

CalibrationText = Annotated[
    Path | None,
    typer.Option(
        "--calib",
        metavar="FILE",
        help="A UTF-8 text like what the model will read. Default: Python's documentation and the model's own samples.",
    ),
]


def calibration_text(file: Path | None, *, rows: int, length: int) -> "CalibrationData":
    """Read the text; without a file, half of the sequences are Python's documentation, half sampled from the model."""
    from crelle.engine.calibration_data import CalibrationData
    from crelle.eval.text import read_text

    if rows < 1 or length < 8:
        raise SchemeError(f"--rows must be at least 1 and --length at least 8, got {rows} and {length}")
    own = 0 if file is not None else rows // 2
    return CalibrationData(text=read_text(file), rows=rows - own, length=length, own=own)

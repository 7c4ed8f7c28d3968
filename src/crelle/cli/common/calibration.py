"""The --calib option: calibration data for the schemes that need it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crelle.errors import SchemeError

if TYPE_CHECKING:
    from crelle.quantize_job.data import CalibrationData

CalibrationText = Annotated[
    Path | None,
    typer.Option(
        "--calib",
        metavar="FILE",
        help="A UTF-8 text like what the model will read. Default: Python's documentation and the model's own samples.",
    ),
]


def calibration_text(file: Path | None, *, rows: int, length: int, own: int = 0) -> "CalibrationData":
    """Read the text; `own` sequences are sampled from the model besides its rows.

    Without a file, half of the rows are Python's documentation, half sampled from the model.
    """
    from crelle.eval.text import read_text
    from crelle.quantize_job.data import CalibrationData

    if rows < 1 or length < 8:
        raise SchemeError(f"--rows must be at least 1 and --length at least 8, got {rows} and {length}")
    if own < 0:
        raise SchemeError(f"--own must be 0 or more sequences, got {own}")
    instead = 0 if file is not None else rows // 2
    return CalibrationData(text=read_text(file), rows=rows - instead, length=length, own=own + instead)

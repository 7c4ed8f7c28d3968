"""What `crelle quantize` says before it starts: what it will do, the quality to expect, and how long it will take."""

from pathlib import Path
from typing import TYPE_CHECKING

from crelle.cli.common.console import err

if TYPE_CHECKING:
    from crelle.formats.storage.open import Weights
    from crelle.quantize_job.effort import Effort


def show_plan(
    weights: "Weights", effort: "Effort", *, device: str, head: str | None, calib: Path | None, length: int
) -> None:
    """Print what will be done, and what quality to expect."""
    from crelle.models.loader import in_usual_form
    from crelle.quantizers.unquantized import sentences_about

    _line(f"{weights.path.name}: effort {effort.name} on {_machine(device)}")
    _line(f"  scheme       {effort.scheme}: {_steps(effort.scheme)}; head {head or 'as it is'}")
    if effort.rows:
        text = "Python's documentation" if calib is None else calib.name
        own = f", and {effort.own} that the model samples" if effort.own else ""
        _line(f"  calibration  {effort.rows} sequences of {length} tokens of {text}{own}")
    for sentence in sentences_about(in_usual_form(weights)):
        _line(f"  left as is   {sentence}")
    _line(f"  quality      {_quality(effort)}")


def show_time(seconds: float | None) -> None:
    """Print the estimate."""
    if seconds is None:
        _line("  time         not estimated; --dry-run measures a layer")
        return
    _line(f"  time         about {duration(seconds)}, estimated from short measurements on this machine")


def show_next(source: Path, made: Path) -> None:
    """Print what to do with a finished checkpoint."""
    _line(f"next: crelle chat {made}" if _chats(made) else f'next: crelle generate {made} --prompt "Once upon a time"')
    _line(f"      crelle eval {made} --text FILE --against {source}")


def duration(seconds: float) -> str:
    """Return a time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _line(text: str) -> None:
    err.print(text, highlight=False, markup=False, soft_wrap=True)


def _machine(device: str) -> str:
    import torch

    from crelle.kernels.threads import available_cores
    from crelle.models.loader import choose_device

    where = choose_device(device)
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    return f"a CPU with {available_cores()} cores"


def _chats(made: Path) -> bool:
    """Whether a checkpoint that was just written has a chat template."""
    from crelle.engine.tokenization.tokenizer import Tokenizer
    from crelle.errors import CrelleError
    from crelle.formats.storage.open import open_weights

    try:
        return Tokenizer.of(open_weights(made, verify=False)).chats
    except CrelleError:  # a model without a tokenizer
        return False


def _steps(scheme: str) -> str:
    """Return in words what a scheme does."""
    from crelle.quantizers.scheme import parse
    from crelle.quantizers.schemes.auto import Auto

    config = parse(scheme)
    if not isinstance(config, Auto):
        return "calibrated" if config.calibrated else "looks at no data"
    what = [f"at most {config.bits:g} bits per weight"]
    what.append("bits searched for every matrix" if config.search else "the same grid everywhere")
    if config.tune != "none" and config.steps:
        what.append(f"{config.steps} training steps for each layer")
    if config.tune == "full":
        what.append("end-to-end training" if config.end < 0 else f"{config.end} steps of end-to-end training")
    return ", ".join(what)


def _quality(effort: "Effort") -> str:
    from crelle.quantize_job.expected_quality import MODEL, expected

    found = expected(effort)
    if found is None:
        return "no figures were measured for this recipe; `crelle eval OUT --text FILE --against SRC` measures it"
    between = " (interpolated)" if len(found.bits) > 1 else ""
    return (
        f"perplexity {found.least:.2f} to {found.most:.2f} times the source's{between}: measured on {MODEL}, "
        "the best and the worst of three texts, calibrated on text like the first; larger models lose less"
    )

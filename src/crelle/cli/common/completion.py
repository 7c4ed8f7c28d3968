"""What a shell proposes for an option's value: `crelle --install-completion`.

Every press of the tab key starts a process, so nothing here may load torch: schemes are a table, which a test compares
with crelle.quantizers.scheme, and a model is told by the names of files alone.
"""

from pathlib import Path

CONFIG = "config.json"  # of a model directory, Hugging Face's or ours
DEVICES = ("auto", "cpu", "cuda")
SCHEMES = {
    "auto:bits=4": "the recommended scheme; bits is the maximum average",
    "rtn:bits=4,group=128": "round to nearest, in seconds",
    "bcq:bits=3,group=128": "binary coding by alternating least squares",
    "gptq:bits=3,group=128": "error feedback on calibration data",
    "hbcq:bits=3,group=128": "binary coding with error feedback",
    "awq:bits=4,group=128": "activation-aware scales",
    "bcq-nested:bits=4,group=128": "2, 3 and 4 bits in one checkpoint",
    "mixed:four=0.25,outliers=0.002,group=16": "2, 4 and 16 bits in one matrix",
    "atom:w=4,a=4,kv=4,group=128,outliers=128": "integer weights and activations",
    "trellis:bits=2": "trellis codes, 1 to 4 bits in half steps: best quality, slow to find",
    "mxfp4": "4-bit floats in blocks of 32, powers of two as scales",
    "nvfp4": "4-bit floats in blocks of 16, 8-bit floats as scales",
    "keep": "every matrix as the source stores it",
    "fp16": "not quantized, 16 bits",
    "bf16": "not quantized, bfloat16",
    "fp32": "not quantized, 32 bits",
}


def schemes(incomplete: str) -> list[tuple[str, str]]:
    """Return the schemes that begin so, each with a usual setting and what it is."""
    return [(scheme, what) for scheme, what in SCHEMES.items() if scheme.startswith(incomplete)]


def devices(incomplete: str) -> list[str]:
    return [d for d in DEVICES if d.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Return the models that a path may become: those beside it, and those one directory below.

    A directory without models is proposed where models are, too. Where there are none, nothing is: then the shell
    completes the path by itself, directory by directory.
    """
    parent, slash, start = incomplete.rpartition("/")
    found: list[str] = []
    plain: list[str] = []
    for path in _children(Path(parent + slash).expanduser(), start):
        name = f"{parent}{slash}{path.name}"
        if _is_model(path):
            found.append(name)
        elif below := [p for p in _children(path, "") if _is_model(p)]:
            found += [f"{name}/{p.name}" for p in below]
        elif path.is_dir():
            plain.append(f"{name}/")
    return found + plain if found else []


def _is_model(path: Path) -> bool:
    return path.suffix == ".gguf" or (path / CONFIG).is_file()


def _children(directory: Path, start: str) -> list[Path]:
    """Return what a directory holds whose name begins so, hidden names only if asked for; nothing if unreadable."""
    try:
        names = sorted(directory.iterdir())
    except OSError:
        return []
    return [p for p in names if p.name.startswith(start) and (start or not p.name.startswith("."))]

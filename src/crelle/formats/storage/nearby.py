"""What a path that is no model was probably meant to be."""

import re
from difflib import get_close_matches
from pathlib import Path

from crelle.formats.storage.destination import partial_of
from crelle.formats.storage.ownership import CONFIG

_FORMS = "give a model directory (config.json, *.safetensors) or a .gguf file"
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # owner/name, as on Hugging Face's hub


def models_in(directory: Path) -> list[Path]:
    """Return the model directories and .gguf files in a directory; none where it cannot be read."""
    try:
        return sorted(p for p in directory.iterdir() if p.suffix == ".gguf" or (p / CONFIG).is_file())
    except OSError:
        return []


def meant_instead(path: Path) -> str:
    """Return the part of a sentence that says what to give instead of a path that does not exist."""
    if partial_of(path).is_dir():
        return "the run is unfinished: run the same `crelle quantize` again with --resume"
    there = path.parent
    while not there.is_dir() and there != there.parent:
        there = there.parent
    near = {str(p): p for p in models_in(there)}
    names = {p.name: name for name, p in near.items()}
    if close := get_close_matches(path.name, names, n=2, cutoff=0.6):
        return f"did you mean {' or '.join(names[c] for c in close)}?"
    if _HUB.fullmatch(str(path)) and not path.parent.exists():
        return f"{_FORMS}; to download one from the hub: hf download {path} --local-dir {path.name}"
    return f"models in that directory: {', '.join(list(near)[:4])}" if near else _FORMS

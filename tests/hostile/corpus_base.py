"""What the cases of the hostile corpus are built with: a tiny model, and code beside it that would leave a mark."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import write_tiny_model

MARK = "CRELLE_HOSTILE_MARK"  # the environment variable that names the file which foreign code would make
CODE = f"import os, pathlib\npathlib.Path(os.environ['{MARK}']).touch()\n"
Build = Callable[[Path], Path]
CASES: dict[str, tuple[Build, str | None]] = {}


def case(name: str, words: str | None, build: Build) -> None:
    assert name not in CASES
    CASES[name] = build, words


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (CODE,)


def arm(to: Path) -> None:
    """Lay out what foreign code would be run from."""
    names = (
        "tokenization_evil",
        "modeling_evil",
        "configuration_evil",
        "__init__",
        "conftest",
        "sitecustomize",
        "torch",
    )
    for name in names:
        (to / f"{name}.py").write_text(CODE + "class Evil:\n    from_pretrained = classmethod(lambda *a, **k: None)\n")
    (to / "vocab.pkl").write_bytes(pickle.dumps(Trap()))


def tiny(to: Path, tokenizer: bool = True, **config: Any) -> Path:
    """The tiny model with another config; the file is changed behind the weights' back."""
    write_tiny_model(to, num_hidden_layers=1)
    said = json.loads((to / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps(said))
    if not tokenizer:
        (to / "tokenizer.json").unlink()
    arm(to)
    return to


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))

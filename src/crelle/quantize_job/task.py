"""Tasks for encoders: JSON Lines with two texts and a score, or a text and a label; tuning a checkpoint on one.

{"text": "A cat sleeps.", "text2": "A kitten is napping.", "score": 0.9}
{"text": "Stocks fell.", "label": "news"}
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.errors import FormatError, SchemeError, UnsupportedError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.destination import destination, refuse_existing, refuse_overlap
from crelle.formats.storage.io import shown
from crelle.formats.storage.open import open_weights
from crelle.models.calibration_model import open_model
from crelle.models.loader import choose_device, read_spec
from crelle.quantizers.training.blockwise import Training
from crelle.quantizers.training.embedding_task import TaskTokens
from crelle.quantizers.training.finetune import TuneReport, What, tune

_MOST_LABELS = 1000
_KINDS = ({"text", "text2", "score"}, {"text", "label"})


@dataclass(frozen=True, slots=True)
class Task:
    """Texts, and what they are alike to: another text each, or a label."""

    texts: tuple[str, ...]
    others: tuple[str, ...]  # of each text, the other one; or its label
    scores: tuple[float, ...] | None  # 0 … 1; None: a task of labels

    @property
    def labels(self) -> tuple[str, ...]:
        """The different labels; () where there are none."""
        return () if self.scores is not None else tuple(sorted(set(self.others)))

    def target(self, labels: tuple[str, ...] = ()) -> Tensor:
        """Return the scores, or which of `labels` (its own by default) each text has."""
        if self.scores is not None:
            return torch.tensor(self.scores)
        known = labels or self.labels
        if odd := sorted(set(self.others) - set(known)):
            raise FormatError(f"the label {shown(odd[0])} is not one of {', '.join(known)}")
        return torch.tensor([known.index(label) for label in self.others])

    def tokens(self, tokenizer: Tokenizer, most: int) -> TaskTokens:
        encode: Callable[[str], list[int]] = lambda text: tokenizer.encode_whole(text, most)  # noqa: E731
        second = self.labels or self.others
        return TaskTokens.of([encode(t) for t in self.texts], [encode(t) for t in second], self.target())


def read_task(path: Path) -> Task:
    """Read a task; each line is checked."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise FormatError(f"{path} cannot be read as UTF-8 text: {e}") from e
    found = [_line(line, f"{path}, line {i}") for i, line in enumerate(lines, start=1) if line.strip()]
    if not found or len({len(item) for item in found}) > 1:
        raise FormatError(f"{path} should have lines of one kind: text, text2 and score, or text and label")
    texts = tuple(item["text"] for item in found)
    if "label" in found[0]:
        task = Task(texts, tuple(item["label"] for item in found), None)
        if not 2 <= len(task.labels) <= _MOST_LABELS:
            raise FormatError(f"{path} should have 2 to {_MOST_LABELS} different labels, not {len(task.labels)}")
        return task
    return Task(texts, tuple(item["text2"] for item in found), tuple(float(item["score"]) for item in found))


def _line(line: str, where: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{where} is not JSON") from e
    if not isinstance(item, dict) or set(item) not in _KINDS:
        raise FormatError(f"{where} should have text, text2 and score, or text and label; got {shown(item)}")
    if any(not isinstance(item[key], str) or not item[key].strip() for key in set(item) - {"score"}):
        raise FormatError(f"{where}: texts and labels should be text, got {shown(item)}")
    if "score" in item and (type(item["score"]) not in (int, float) or not 0 <= item["score"] <= 1):
        raise FormatError(f"{where}: the score should be from 0 to 1, got {shown(item['score'])}")
    return item


def tune_task(
    source: str | Path,
    task: Task,
    out: str | Path,
    training: Training,
    *,
    length: int = 128,
    what: What = "scales",
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    low_memory: bool | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> TuneReport:
    """Tune an encoder's checkpoint on a task; `length`: texts are cut to that many tokens."""
    out = destination(out)
    refuse_overlap(out, source)
    refuse_existing(out, resume=resume, overwrite=overwrite)
    checkpoint = open_weights(source)
    if not isinstance(checkpoint, Checkpoint):
        raise FormatError(f"{source} is not a Crelle checkpoint; quantize the model first")
    spec = read_spec(checkpoint)
    if not spec.encoder:
        raise UnsupportedError(
            f"{source} is a decoder, and tasks are for encoders; write the task as text and tune with --text"
        )
    if low_memory is None:
        low_memory = False  # encoders are small, and their texts short
    tokens = task.tokens(Tokenizer.of(checkpoint), min(length, spec.context))
    return tune(
        checkpoint,
        None,
        out,
        replace(training, low_memory=low_memory),
        tokens=tokens.first,
        task=tokens,
        open_model=open_model,
        device=choose_device(device),
        what=what,
        resume=resume,
        overwrite=overwrite,
        low_memory=low_memory,
        progress=progress,
    )


def refuse_other_options(**given: object) -> None:
    """Refuse what a task leaves no room for."""
    for name, value in given.items():
        if value:
            raise SchemeError(f"--{name} does not apply to --task")

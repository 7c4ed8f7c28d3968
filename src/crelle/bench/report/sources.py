"""What a result file says about itself: command, date, machine, model and text."""

import re
from collections.abc import Iterable

from crelle.bench.report.fields import Fields
from crelle.bench.report.rows import Source

_MODELS = {"smollm2": "SmolLM2-135M", "stories15m": "stories15M"}
_TEXTS = {"wikitext": "WikiText-2", "tinystories": "TinyStories", "python": "Python's documentation"}


def source(file: Fields, name: str) -> Source:
    """Return what stands under a figure that is drawn from this file."""
    commands = file.values.get("commands")
    several = "; ".join(str(c) for c in commands) if isinstance(commands, list) else "not recorded"
    return Source(name, file.text("command", several), file.text("date", "not recorded"), _machine(file))


def gpu_name(file: Fields) -> str:
    """Return the GPU that a file names, or ''."""
    if "gpu" in file:
        return file.inner("gpu").text("name")
    device = file.values.get("device")
    return device if isinstance(device, str) and device != "cpu" else ""


def cpu_device(file: Fields) -> str:
    """Return what ran a row whose device is cpu."""
    machine = file.values.get("machine")
    if not isinstance(machine, dict) or "cpu" not in machine:
        return _machine(file)
    cores = machine.get("cores")
    return f"{machine['cpu']}, {cores} cores" if isinstance(cores, int) else str(machine["cpu"])


def model_name(*texts: str) -> str:
    """Return the model that the first of some texts names, or that text itself: many spellings, one model."""
    return known_model(texts) or texts[0]


def known_model(texts: Iterable[str]) -> str | None:
    """Return the model that the first of some texts names, if one does."""
    return next((name for text in texts for part, name in _MODELS.items() if part in text.lower()), None)


def text_name(text: str) -> str:
    return next((name for part, name in _TEXTS.items() if part in text.lower()), text)


def family(scheme: str) -> str:
    """Return what a scheme is called in a legend: its name, and whether all of it was trained."""
    name = re.split(r"[:,]", scheme, maxsplit=1)[0]
    return f"{name}, tune=full" if "tune=full" in scheme else name


def _machine(file: Fields) -> str:
    machine = file.values.get("machine")
    if isinstance(machine, str):
        return machine
    if not isinstance(machine, dict):
        return gpu_name(file) or "machine not recorded"
    gpu = gpu_name(file) or str(machine.get("gpu", ""))
    if not gpu and "--device cuda" in file.text("command", ""):
        gpu = "a GPU that the file does not name"
    host = cpu_device(file) if "cpu" in machine else ""
    return f"{gpu} ({host})" if gpu and host else gpu or host or "machine not recorded"

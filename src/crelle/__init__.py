"""Crelle: large language models at 1 to 4 bits per weight, on a CPU, on one GPU, and through vLLM.

>>> from crelle import LLM
>>> llm = LLM.load("out/smollm2-3bit")                        # doctest: +SKIP
>>> print(llm.generate("The capital of France is").text)      # doctest: +SKIP

The names below load their modules on first use, so `import crelle` costs nothing. It also makes transformers open our
checkpoints, now or whenever transformers is imported (crelle.integrations.transformers).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from crelle.integrations.transformers.hook import register_when_imported
from crelle.version import __version__

_HOME = {
    "LLM": "crelle.engine.llm",
    "Completion": "crelle.engine.llm",
    "CrelleConfig": "crelle.integrations.transformers.config",
    "Sampling": "crelle.engine.sampling.sampler",
    "CrelleError": "crelle.errors",
    "Embedder": "crelle.engine.embedding.embedder",
    "perplexity": "crelle.eval.perplexity",
    "CalibrationData": "crelle.quantize_job.data",
    "quantize": "crelle.quantize_job.run",
}

__all__ = [
    "LLM",
    "CalibrationData",
    "Completion",
    "CrelleConfig",
    "CrelleError",
    "Embedder",
    "Sampling",
    "__version__",
    "perplexity",
    "quantize",
]

if TYPE_CHECKING:
    from crelle.engine.embedding.embedder import Embedder
    from crelle.engine.llm import LLM, Completion
    from crelle.engine.sampling.sampler import Sampling
    from crelle.errors import CrelleError
    from crelle.eval.perplexity import perplexity
    from crelle.integrations.transformers.config import CrelleConfig
    from crelle.quantize_job.data import CalibrationData
    from crelle.quantize_job.run import quantize


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'crelle' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """List the names that are loaded on first use, too: for `dir(crelle)` and completion."""
    return sorted({*globals(), *__all__})


register_when_imported()

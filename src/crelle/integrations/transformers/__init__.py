"""Crelle inside transformers: checkpoints, quantization on the fly or calibrated, and a KV cache of few bits.

    import crelle                                                                  # registers what follows
    model = AutoModelForCausalLM.from_pretrained("out/llama-3bit")                 # a Crelle checkpoint
    model = AutoModelForCausalLM.from_pretrained("llama", quantization_config=CrelleConfig("rtn:bits=4,group=64"))
    model.generate(**inputs, past_key_values=CrelleCache(model.config, "4"))
    quantize(model, "mixed:four=0.25", batches)                                    # any model, with calibration

Modules: config.py and quantizer.py are what transformers asks for, layers.py and experts.py what stands in the model
instead of its own modules, placement.py puts them there, on_the_fly.py, calibration.py, saving.py, cache.py do what
their names say; hook.py registers all this when transformers is imported, which `import crelle` does not do itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "CrelleConfig": "config",
    "CrelleCache": "cache",
    "CrelleLinear": "layers",
    "CrelleQuantizer": "quantizer",
    "quantize": "calibration",
    "register": "hook",
}

__all__ = ["CrelleCache", "CrelleConfig", "CrelleLinear", "CrelleQuantizer", "quantize", "register"]

if TYPE_CHECKING:
    from crelle.integrations.transformers.cache import CrelleCache
    from crelle.integrations.transformers.calibration import quantize
    from crelle.integrations.transformers.config import CrelleConfig
    from crelle.integrations.transformers.hook import register
    from crelle.integrations.transformers.layers import CrelleLinear
    from crelle.integrations.transformers.quantizer import CrelleQuantizer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

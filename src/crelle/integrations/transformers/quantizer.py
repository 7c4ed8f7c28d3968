"""What transformers calls while it loads a model: before the weights come, for each of them, and after."""

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.ownership import INDEX
from crelle.integrations.transformers.config import CrelleConfig
from crelle.kernels import cpu

OLDEST = (5, 16)  # whose quantizers are asked as this one expects it
logger = logging.get_logger(__name__)


def require_version(version: str = transformers.__version__) -> None:
    """Refuse a transformers whose interface is another one."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if not OLDEST <= numbers < (6,):
        raise UnsupportedError(
            f"Crelle works with transformers {'.'.join(map(str, OLDEST))} or a later 5.x, but {version} is installed"
        )


class CrelleQuantizer(HfQuantizer):
    """Loads Crelle checkpoints, and quantizes plain models while they are loaded."""

    quantization_config: CrelleConfig

    def __init__(self, quantization_config: CrelleConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.checkpoint: Checkpoint | None = None
        self._dequantized: dict[str, str] = {}
        self._norms: list[str] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self._on_the_fly: Any = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        require_version()
        if not self.pre_quantized:
            self.quantization_config.require_no_calibration()
        if (why := cpu.available()) and not torch.cuda.is_available():
            logger.warning_once(f"crelle: the C++ core {why}; products go through torch, several times slower")

    def update_tp_plan(self, config: Any) -> Any:
        """Set the name of our index: transformers asks here before it looks for the files."""
        if getattr(config, "distributed_config", None) is not None:
            raise UnsupportedError("a Crelle checkpoint is not split over several devices here; vLLM does that")
        if self.pre_quantized:
            ours = all(name.startswith("crelle-") for name in self.quantization_config.shards)
            config.transformers_weights = INDEX if ours else None
        return config

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if not self.pre_quantized:
            from crelle.integrations.transformers.on_the_fly import OnTheFly

            self._on_the_fly = OnTheFly(model, self.quantization_config)
            return
        from crelle.integrations.transformers.placement import place

        if not checkpoint_files:
            raise FormatError("a Crelle checkpoint is read from a directory, not from a state_dict")
        self.checkpoint = Checkpoint(Path(checkpoint_files[0]).parent)
        require_precision(self.checkpoint, self.quantization_config.bits)
        self._dequantized = place(model, self.checkpoint, self.quantization_config)
        self._dtypes = {name: p.dtype for name, p in model.named_parameters()}
        self._prepare_norms(model)

    def _prepare_norms(self, model: Any) -> None:
        """Load norms that have their offset added already as f32: 1 + w has no room for w in 16 bits."""
        assert self.checkpoint is not None
        if _added_offset(self.checkpoint):
            for name, p in list(model.named_parameters()):
                if p.ndim == 1 and name.endswith("norm.weight"):
                    module, _, kind = name.rpartition(".")
                    wide = nn.Parameter(torch.empty_like(p, dtype=torch.float32), requires_grad=False)
                    setattr(model.get_submodule(module), kind, wide)
                    self._norms.append(name)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return self._on_the_fly is not None and self._on_the_fly.takes(param_name)

    def get_quantize_ops(self) -> Any:
        return self._on_the_fly.operation()

    @torch.no_grad()
    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from crelle.integrations.transformers.methods import bind

        if self._on_the_fly is not None:
            self._on_the_fly.finish(model)
        if self.checkpoint is not None:
            self._finish(model, self.checkpoint)
            self.checkpoint = None
        bind(model)
        return model

    def _finish(self, model: Any, checkpoint: Checkpoint) -> None:
        offset = _added_offset(checkpoint)
        for name in self._norms:
            p = model.get_parameter(name)
            p.data = p.data - offset
        for name, module in self._dequantized.items():
            p = model.get_parameter(name)
            p.data = checkpoint.matrix(module).dequantize(torch.float32).to(p.device)
        for name, p in model.named_parameters():
            if (dtype := self._dtypes.get(name)) is not None and p.dtype != dtype and p.is_floating_point():
                p.data = p.data.to(dtype)
            if p.is_meta:
                raise FormatError(f"{checkpoint.path} has no tensor '{name}'")

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        from crelle.integrations.transformers.methods import dequantize, unbind

        dequantize(model, dtype)
        unbind(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters are: gradients pass through our linears

    @property
    def is_compileable(self) -> bool:
        return True


def require_precision(checkpoint: Checkpoint, bits: int | None) -> None:
    from crelle.models.nested import require

    if bits is not None:
        require(checkpoint, bits)


def _added_offset(checkpoint: Checkpoint) -> float:
    """Return what the norms of a checkpoint have added that the family's own files have not."""
    from crelle.models.families import families

    family = families().get(checkpoint.config.get("model_type", ""))
    if family is None or not family.norm_offset:
        return 0.0
    return family.norm_offset - float(checkpoint.config.get("norm_weight_offset", family.norm_offset))

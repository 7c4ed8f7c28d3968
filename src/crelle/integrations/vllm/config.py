"""The quantization_config of a Crelle checkpoint, as vLLM asks for it: which layer gets which method."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from crelle.errors import FormatError, UnsupportedError
from crelle.formats.base import Spec, shape_of
from crelle.formats.dense import DenseTensor
from crelle.formats.storage.checkpoint import check_quantization
from crelle.integrations.vllm.embedding import CrelleEmbeddingMethod
from crelle.integrations.vllm.experts import CrelleExpertsMethod
from crelle.integrations.vllm.linear import CrelleLinearMethod
from crelle.integrations.vllm.product import Settings
from crelle.integrations.vllm.stream import CheckpointMapper
from crelle.integrations.vllm.verification import verify_once
from crelle.integrations.vllm.versions import wrong_version

_NUMBERED = re.compile(r"\.\d+\.")  # modules of layers


@register_quantization_config("crelle")
class CrelleConfig(QuantizationConfig):
    """The specs of all matrices of a checkpoint, by module, under the names that vLLM gives to modules."""

    def __init__(self, specs: dict[str, Spec]) -> None:
        super().__init__()
        self.specs = specs
        self.stored = {name: name for name in specs}  # what each is called in the checkpoint
        self.asked: set[str] = set()  # matrices that layers asked for
        self.norm_offset = 0.0

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CrelleConfig":
        if reason := wrong_version():
            raise UnsupportedError(reason)
        return cls(check_quantization(config, "config.json")["tensors"])

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Say at once what is wrong with a directory: a shard that is missing, truncated or altered.

        vLLM asks once, in the process that starts all others: ranks find the files checked, and in the page cache.
        """
        if Path(model_name).is_dir():
            verify_once(Path(model_name))
        if (kind := getattr(hf_config, "model_type", None)) == "gpt2":
            raise UnsupportedError("Crelle stores GPT-2's q, k and v apart, which vLLM's GPT-2 does not load")
        if str(kind).startswith("gemma") and getattr(hf_config, "norm_weight_offset", None) == 0:
            self.norm_offset = 1.0

    def get_name(self) -> str:
        return "crelle"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        names = {name: mapped for name in self.specs if (mapped := hf_to_vllm_mapper.map_name(name)) is not None}
        self.stored = {mapped: self.stored[name] for name, mapped in names.items()}
        self.specs = {mapped: self.specs[name] for name, mapped in names.items()}

    def get_checkpoint_weight_mapper(self) -> CheckpointMapper:
        """Return what vLLM sends the tensors through; it asks when all layers are made."""
        plain = {self.stored[name]: spec for name, spec in self.specs.items() if name not in self.asked}
        plain = {name: spec for name, spec in plain.items() if _quantized(spec)}
        return CheckpointMapper(plain=plain, bits=_settings().bits, norm_offset=self.norm_offset)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            modules = self._matrices(prefix)
            if any(_quantized(spec) for _, spec in modules):
                self.asked |= {name for name, _ in modules}
                return CrelleLinearMethod(modules, _settings())
            return UnquantizedLinearMethod()
        if isinstance(layer, VocabParallelEmbedding):
            found = self._table(layer, prefix)
            if found is None or not _quantized(found[1]):
                return None
            head = isinstance(layer, ParallelLMHead)
            if not head or self._has_head():
                self.asked.add(found[0])  # a tied head has the matrix from the embedding, if that is ours
            return CrelleEmbeddingMethod(
                *found, _settings(), looks_up=not head, multiplies=head or not self._has_head()
            )
        if isinstance(layer, RoutedExperts):
            specs = self._experts(layer, prefix)
            self.asked |= {name for name, _ in specs.values()}
            return CrelleExpertsMethod(layer, specs, _settings()) if specs else None
        return None

    def _matrices(self, prefix: str) -> list[tuple[str, Spec]]:
        """Return what the checkpoint has for a layer: its matrix, or those that vLLM fuses into it."""
        if prefix in self.specs:
            return [(prefix, self.specs[prefix])]
        before, _, last = prefix.rpartition(".")
        names = [f"{before}.{part}" for part in self.packed_modules_mapping.get(last, [])]
        found = [(name, self.specs[name]) for name in names if name in self.specs]
        if found and len(found) < len(names):
            missing = next(name for name in names if name not in self.specs)
            raise FormatError(f"the checkpoint has '{found[0][0]}', but no '{missing}', which vLLM fuses with it")
        return found

    def _experts(self, layer: RoutedExperts, prefix: str) -> dict[tuple[int, str], tuple[str, Spec]]:
        """Return the matrices of all experts of a layer; {} where they are not quantized."""
        gate, up, down = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
        names = {"w1": gate, "w3": up, "w2": down}
        before = prefix.removesuffix(".routed_experts")
        found = {
            (e, shard): (module, self.specs[module])
            for e in range(layer.global_num_experts)
            for shard, name in names.items()
            if (module := f"{before}.{e}.{name}") in self.specs
        }
        if not any(_quantized(spec) for _, spec in found.values()):
            return {}
        if len(found) < layer.global_num_experts * sum(name is not None for name in names.values()):
            raise FormatError(
                f"'{before}': the checkpoint has {len(found)} matrices of its experts, and some are missing"
            )
        return found

    def _table(self, layer: VocabParallelEmbedding, prefix: str) -> tuple[str, Spec] | None:
        """Return the matrix of an embedding or head; many models do not tell the embedding's name."""
        if prefix in self.specs:
            return prefix, self.specs[prefix]
        shape = (layer.org_vocab_size, layer.embedding_dim)
        head = isinstance(layer, ParallelLMHead) and self._has_head()
        named = {m: s for m, s in self.specs.items() if not _NUMBERED.search(m) and m.endswith("lm_head") == head}
        found = [(m, s) for m, s in named.items() if shape_of(s) == shape]
        if len(found) > 1:
            raise FormatError(f"'{found[0][0]}' and '{found[1][0]}' could both be the embedding")
        return found[0] if found else None

    def _has_head(self) -> bool:
        """Whether the head has a matrix of its own; otherwise it is the embedding's."""
        return any(m.endswith("lm_head") for m in self.specs)


def _quantized(spec: Spec) -> bool:
    return bool(spec["format"] != DenseTensor.format)


def _settings() -> Settings:
    """Return what the user chose, e.g. --additional-config '{"crelle": {"bits": 2}}'."""
    extra = getattr(get_current_vllm_config_or_none(), "additional_config", None)
    return Settings.of(extra.get("crelle", {}) if isinstance(extra, dict) else {})

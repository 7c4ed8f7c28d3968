"""More calibration text for experts that the sequences to calibrate on reach rarely."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.formats.storage.open import Weights
from crelle.models.calibration_model import open_model
from crelle.quantize_job.data import CalibrationData, rows_of
from crelle.quantizers.calibration.calibrate import memory_for
from crelle.quantizers.calibration.expert_coverage import ExpertTokens, cover_experts
from crelle.quantizers.calibration.layer_api import Progress
from crelle.quantizers.ranks import world


def with_rows_for_experts(
    weights: Weights,
    rows: Tensor,
    text: CalibrationData,
    device: torch.device,
    memory: int | None,
    progress: Progress | None,
) -> tuple[Tensor, ExpertTokens]:
    """Add sequences of the text for experts that the chosen ones reach rarely. The first rank finds them."""
    more = world().once_tensor(
        lambda: rows_of(Tokenizer.of(weights), text.text, rows.shape[1], text.rows, text.seed, more=True)
    )

    def found() -> dict[str, Any]:
        model = open_model(weights, device)
        batch = memory_for(model, rows, device, budget=memory).batch
        return asdict(cover_experts(model, rows, more, device=device, batch=batch, progress=progress))

    coverage = world().once(found)
    return torch.cat([rows, more[coverage["added"]]]), ExpertTokens(**coverage["experts"])

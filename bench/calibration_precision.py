"""What calibrating as a GPU does (bf16 hidden states, products and Hessian inputs) changes, computed on a CPU.

    python bench/calibration_precision.py OUT.json DATA [LAYERS [ROWS [SCHEME]]]      DATA: a folder with text/

The first layers of SmolLM2 are quantized twice, in f32 and with bf16 as on a GPU, from the same text; the others stay
as they are. Then, in f32 for both: perplexity of other text over that of the model as it was, and how far the hidden
states behind the last quantized layer are off on that text.
"""

import sys
from pathlib import Path
from time import perf_counter
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from crelle.bench.environment import environment
from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.eval.plan_eval import open_perplexity
from crelle.eval.smollm2 import smollm2
from crelle.formats.storage.io import to_json, write_whole
from crelle.formats.storage.open import open_weights
from crelle.models.calibration_model import CalibrationModel, open_model
from crelle.quantize_job.data import rows_of
from crelle.quantizers.calibration.calibrate import Calibrator
from crelle.quantizers.calibration.layer_api import TrainableLinear
from crelle.quantizers.calibration.memory_plan import CalibrationMemory
from crelle.quantizers.scheme import parse
from crelle.quantizers.training.blockwise import relative_error

BF16 = torch.bfloat16


def product_in_bf16(self: TrainableLinear, x: Tensor) -> Tensor:
    """Return what autocast gives on a GPU: both factors and the result rounded, sums in f32."""
    return F.linear(x.to(BF16).float(), self.weight.to(BF16).float(), self.bias).to(BF16).float()


def quantized(model: CalibrationModel, tokens: Tensor, scheme: str, layers: int, half: bool) -> dict[str, Tensor]:
    """Return the weights of the first layers, dequantized."""
    config, found = parse(scheme), {}
    calibrator = Calibrator(model, tokens, memory=CalibrationMemory(states=BF16 if half else torch.float32))
    product = mock.patch.object(TrainableLinear, "_product", product_in_bf16)
    for _ in range(layers):
        with product if half else mock.MagicMock():
            layer = calibrator.begin()
            fitted = layer.fit(lambda module, weight, stats: config.fit(weight, stats))
            layer.end()
        found |= {module: w.dequantize() for module, w in fitted.items()}
    return found


@torch.no_grad()
def states(model: CalibrationModel, tokens: Tensor, layers: int, weights: dict[str, Tensor]) -> Tensor:
    x = model.embed(tokens)
    for i in range(layers):
        block = model.block(i)
        for name, linear in block.linears().items():
            linear.weight = weights.get(name, linear.weight)
        x = block(x)
    return x


def main() -> None:
    out, data = Path(sys.argv[1]), Path(sys.argv[2])
    layers, rows = (int(a) if a else d for a, d in zip([*sys.argv[3:5], "", ""], (4, 16), strict=False))
    scheme = sys.argv[5] if len(sys.argv) > 5 else "gptq:bits=3,group=64"
    weights = open_weights(smollm2())
    model, tokenizer = open_model(weights), Tokenizer.of(weights)
    tokens = rows_of(tokenizer, (data / "text" / "wikitext2-valid-tokenised.txt").read_text(), 512, rows)
    test = rows_of(tokenizer, (data / "text" / "wikitext2-test.txt").read_text(), 512, 8)
    cpu = torch.device("cpu")
    plain, full = open_perplexity(model, test, cpu), states(model, test, layers, {})
    result: dict[str, object] = {"scheme": scheme, "layers": layers, "rows": rows, "length": 512, "perplexity": plain}
    for name, half in (("bf16", True), ("f32", False)):
        begun = perf_counter()
        found = quantized(model, tokens, scheme, layers, half)
        off = float(relative_error(states(model, test, layers, found), full))
        ratio = open_perplexity(model, test, cpu, found) / plain
        result[name] = {"ratio": ratio, "relative_error": off, "seconds": perf_counter() - begun}
        print(name, result[name], flush=True)
    write_whole(out, to_json({**environment(), "command": "python bench/calibration_precision.py OUT DATA", **result}))


if __name__ == "__main__":
    main()

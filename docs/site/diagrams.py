"""Draws the pictures of the architecture and of every format: `python docs/site/diagrams.py` writes docs/images/*.svg.

Values in the pictures are computed by the formats' equations from the codes that are shown.
"""

from pathlib import Path

import diagrams_formats
import diagrams_mixed
from drawing import Drawing

IMAGES = Path(__file__).resolve().parents[1] / "images"

LAYERS = [  # name, what it is for; imports run down this list
    ("cli", "crelle quantize · eval · generate · chat · serve · plan · explain · bench · export · doctor"),
    ("integrations", "transformers (HfQuantizer)  ·  vLLM (plugin)  ·  lm-eval"),
    ("", ""),
    ("engine", "many requests at once: scheduler, block manager, model runner, sampler, LLM"),
    ("models", "families: config → DecoderSpec;  the torch forward of a spec;  executors are chosen here"),
    ("quantizers", "which bits to choose: fit(weight, stats) → QuantTensor;  calibration, search, training"),
    ("kernels", ""),
    (
        "formats",
        "what the bits mean: bcq, affine, nested, mixed, grouped (Atom), kv;  checkpoints, importers, exporters",
    ),
]
TOP = [
    ("eval", "perplexity, tasks"),
    ("bench", "kernels, decode, serving, plan"),
    ("server", "OpenAI's protocol, playground"),
]
BACKENDS = [
    ("reference", "torch: the oracle of every op"),
    ("cpu", "C++: AVX2, AVX-512, AMX, NEON"),
    ("cuda", "NVRTC: bmma, wgmma, graphs"),
]


def architecture() -> Drawing:
    d = Drawing(860, 545, "The layers of Crelle: imports run down")
    y = 20
    for name, words in LAYERS:
        tall = 84 if name == "kernels" else 50
        if not name:
            for i, (part, about) in enumerate(TOP):
                d.box(60 + i * 262, y, 256, tall, round_=4)
                d.text(74 + i * 262, y + 21, part, "a", bold=True)
                d.text(74 + i * 262, y + 39, about, "soft", size=12)
        else:
            d.box(60, y, 780, tall, round_=4)
            d.text(74, y + 21, name, "a", bold=True)
            d.text(74, y + 39, words, "soft", size=12)
        if name == "kernels":
            d.text(
                150,
                y + 21,
                "ops.py: the only door;  supports(problem) → None, or the sentence why not",
                "soft",
                size=12,
            )
            for i, (part, about) in enumerate(BACKENDS):
                d.box(74 + i * 254, y + 32, 244, 42, "line", round_=4)
                d.text(84 + i * 254, y + 50, part, "ink", size=12, bold=True)
                d.text(84 + i * 254, y + 66, about, "soft", size=11)
        y += tall + 8
    d.line(36, 30, 36, y - 20, arrow=True)
    d.parts.append(f'<text transform="translate(26 {y / 2 + 45:g}) rotate(-90)" class="soft">imports run down</text>')
    d.text(
        60,
        y + 14,
        "One object from quantizer to server: a QuantTensor is fitted, prepared by a kernel, evaluated, served.",
        "soft",
        size=12,
    )
    return d


DRAWINGS = {
    "architecture": architecture,
    "bcq": diagrams_formats.bcq,
    "format-uniform": diagrams_formats.uniform,
    "format-nested": diagrams_formats.nested,
    "format-mixed": diagrams_mixed.mixed,
    "format-atom": diagrams_mixed.atom,
    "format-kv": diagrams_mixed.kv,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")

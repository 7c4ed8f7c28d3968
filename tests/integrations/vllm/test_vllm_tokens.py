"""vLLM's greedy tokens are those of `crelle generate`, for every format and for several families."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_tokenizer
from dequantized_model import write_dequantized
from foreign_packers import gptq, write_models
from greedy import IDS, TEXTS, TOKENS
from random_models import write_random
from vllm_process import Job, environment, run_jobs, tokens_of

from crelle import LLM, CalibrationData, Sampling, quantize
from crelle.formats.exporters.directory import export_directory
from crelle.formats.exporters.gptq import GPTQLayout
from crelle.formats.storage.open import open_weights

pytestmark = pytest.mark.vllm

AS_LIKELY = 0.001  # in standard deviations of the logits

# (scheme, overrides, head, bits to serve)
STORIES: dict[str, tuple[str, dict[str, str], str | None, int | None]] = {
    "bcq 3": ("bcq:bits=3,group=32,rounds=3", {}, None, None),
    "uniform, tied head quantized": ("rtn:bits=4,group=32", {}, "rtn:bits=4,group=32", None),
    "affine": ("gptq:bits=4,group=32,free=true", {}, None, None),
    "nested at 4 bits": ("bcq-nested:bits=4,group=32,data=false", {}, None, None),
    "nested at 3 bits": ("bcq-nested:bits=4,group=32,data=false", {}, None, 3),
    "mixed": ("mixed:four=0.25,outliers=0.002,group=16", {}, None, None),
    "trellis behind a rotation": ("trellis:bits=2", {}, None, None),
    "mxfp4": ("mxfp4", {}, None, None),
    "nvfp4": ("nvfp4", {}, None, None),
    "atom, W4A8": ("atom:w=4,a=8,kv=16,group=32,outliers=32", {}, None, None),
    "several formats in fused layers": (
        "bcq:bits=3,group=32,rounds=2",
        {"*.q_proj": "rtn:bits=4,group=32", "*.v_proj": "fp16", "*.gate_proj": "rtn:bits=8,group=96"},
        None,
        None,
    ),
}


@pytest.fixture(scope="module")
def stories(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], dict[str, Job]]:
    """All checkpoints of STORIES, and what vLLM says behind TEXTS: one process for all of them."""
    to, made = tmp_path_factory.mktemp("stories"), {}
    text = CalibrationData(text=(data / "text" / "tinystories-calibration.txt").read_text(), rows=4, length=64)
    for i, (case, (scheme, overrides, head, _)) in enumerate(STORIES.items()):
        same = next((c for c in made if STORIES[c][:3] == (scheme, overrides, head)), None)
        made[case] = made[same] if same else to / str(i)
        if same is None:
            calibrated = scheme.split(":")[0] in ("gptq", "mixed", "atom", "trellis")
            source = data / "stories15M"
            quantize(source, made[case], scheme, overrides=overrides, head=head, text=text if calibrated else None)
    jobs = []
    for case, (*_, bits) in STORIES.items():
        options = {} if bits is None else {"additional_config": {"crelle": {"bits": bits}}}
        jobs.append({"model": str(made[case]), "prompts": TEXTS, "tokens": TOKENS, "options": options})
    answers = run_jobs(jobs, timeout=600)
    return made, dict(zip(STORIES, answers, strict=True))


def crelle_tokens(checkpoint: Path, prompts: list[Any], bits: int | None = None) -> list[list[int]]:
    llm = LLM.load(checkpoint, device="cpu")
    return [list(llm.generate(p, Sampling(max_tokens=TOKENS), bits=bits).tokens) for p in prompts]


@pytest.mark.parametrize("case", STORIES)
def test_tokens_equal_those_of_crelle(case: str, stories: Any) -> None:
    """Or, where two tokens are as likely, those that crelle finds when it reads the whole sequence at once."""
    made, answers = stories
    found, bits = tokens_of(answers[case]), STORIES[case][3]
    if found != crelle_tokens(made[case], TEXTS, bits):
        assert bits is None
        encode = LLM.load(made[case], device="cpu").tokenizer.encode
        # A difference of 1e-7 can move an integer activation by a whole step, and a logit by some hundredths.
        as_likely = 0.03 if case.startswith("atom") else AS_LIKELY
        require_same(made[case], found, [list(encode(text)) for text in TEXTS], as_likely)


FAMILIES = ("Gemma3", "Gemma2", "Qwen2", "OPT")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Random models with quantized layers and head; those that vLLM builds without quantized embeddings too."""
    to, made = tmp_path_factory.mktemp("families"), {}
    for family in FAMILIES:
        source = write_random(to / family, family)
        write_tokenizer(source)
        made[family] = to / f"{family}-3"
        quantize(source, made[family], "bcq:bits=3,group=32,rounds=2", head="rtn:bits=4,group=32")
    answers = run_jobs([{"model": str(m), "prompts": IDS, "tokens": TOKENS} for m in made.values()])
    return made, dict(zip(made, answers, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_crelle(family: str, families: Any) -> None:
    made, answers = families
    require_same(made[family], tokens_of(answers[family]))


def require_same(
    checkpoint: Path, found: list[list[int]], prompts: list[list[int]] = IDS, as_likely: float = AS_LIKELY
) -> None:
    """Each token behind the prompts must be crelle's most likely one, or within `as_likely` standard deviations of it.

    The logits of random models lie close together, and our kernels round x to 16 bits, so that differences of 1e-7
    before a product are 1e-5 behind it.
    """
    model = LLM.load(checkpoint, device="cpu").model
    compared = 0
    for prompt, tokens in zip(prompts, found, strict=True):
        logits = model(torch.tensor([prompt + tokens[:-1]]), model.new_cache())[0, len(prompt) - 1 :]
        lost = logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]  # 0: the most likely token
        assert float(lost.max()) < as_likely * float(logits.std()), (prompt, tokens)
        compared += int((lost == 0).sum())
    assert compared > 0.98 * len(prompts) * TOKENS


@pytest.mark.parametrize(("family", "bits"), [("Mixtral", 2), ("Mixtral", 3), ("Qwen3Moe", 3), ("Qwen3Moe", 4)])
def test_experts_equal_dequantized_ones(family: str, bits: int, tmp_path: Path) -> None:
    """The reference is vLLM with the values that the codes stand for: it routes as the quantized model does."""
    source = write_random(tmp_path / "source", family)
    overrides = {"*.1.*": "rtn:bits=4,group=32"}  # experts and layers differ in their formats
    quantize(source, tmp_path / "q", f"bcq:bits={bits},group=32,rounds=2", overrides=overrides)
    plain = write_dequantized(tmp_path / "q", tmp_path / "plain")
    options = {"skip_tokenizer_init": True}
    jobs = [{"model": str(m), "prompts": IDS, "tokens": TOKENS, "options": options} for m in (tmp_path / "q", plain)]
    ours, theirs = run_jobs(jobs)
    assert tokens_of(ours) == tokens_of(theirs)


def test_act_order_equals_crelle(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 3, "group_size": 32, "desc_act": True, "sym": False}
    theirs, _ = write_models(
        tmp_path, gptq, {**config, "checkpoint_format": "gptq_v2"}, bits=3, group=32, scattered=True
    )
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # vLLM has no heads of 16
    (theirs / "config.json").write_text(json.dumps(json.loads((theirs / "config.json").read_text()) | heads))
    quantize(theirs, tmp_path / "q", "keep")
    require_same(
        tmp_path / "q", tokens_of(run_jobs([{"model": str(tmp_path / "q"), "prompts": IDS, "tokens": TOKENS}])[0])
    )


@pytest.mark.parametrize("bits", [2, 3])
def test_imported_gptq_is_served(bits: int, data: Path, tmp_path: Path) -> None:
    """Of GPTQ, vLLM dropped 2 and 3 bits; what it printed before was "!!!!" (vllm 37185)."""
    text = CalibrationData(text=(data / "text" / "tinystories-calibration.txt").read_text(), rows=4, length=64)
    quantize(data / "stories15M", tmp_path / "made", f"gptq:bits={bits},group=32", text=text)
    export_directory(open_weights(tmp_path / "made"), tmp_path / "gptq", GPTQLayout())
    words = served_text(tmp_path / "gptq", tmp_path / "q")
    assert bits == 2 or "little" in words[0]  # at 2 bits, calibrated on 256 tokens, it makes little sense
    for w in words:
        assert "!!" not in w
        assert sum(c.isalpha() for c in w) > 20


@pytest.mark.parametrize("bits", [2, 3])
def test_gptq_of_another_packer_is_served(bits: int, data: Path, tmp_path: Path) -> None:
    """Rounded to nearest: at 2 bits the text makes little sense, but it is text, and crelle's."""
    if importlib.util.find_spec("auto_round") is None:
        pytest.skip("auto-round is not installed here")
    code = f"""
import torch, transformers
from auto_round import AutoRound
source = {str(data / "stories15M")!r}
model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
tokenizer = transformers.AutoTokenizer.from_pretrained(source)
rounding = AutoRound(model, tokenizer, scheme="W4A16", bits={bits}, group_size=32, sym=False, iters=0, device_map="cpu")
rounding.quantize_and_save({str(tmp_path / "packed")!r}, format="auto_gptq")
"""
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=300)
    (packed,) = (config.parent for config in (tmp_path / "packed").rglob("config.json"))
    for words in served_text(packed, tmp_path / "q"):
        assert "!!" not in words
        assert sum(c.isalpha() for c in words) > 20


def served_text(packed: Path, to: Path) -> list[str]:
    """Import a GPTQ directory and serve it; the tokens must be crelle's, or as likely. Return the texts."""
    quantize(packed, to, "keep")
    found = tokens_of(run_jobs([{"model": str(to), "prompts": TEXTS, "tokens": TOKENS}])[0])
    tokenizer = LLM.load(to, device="cpu").tokenizer
    if found != crelle_tokens(to, TEXTS):
        require_same(to, found, [list(tokenizer.encode(text)) for text in TEXTS])
    return [tokenizer.decode(tokens) for tokens in found]

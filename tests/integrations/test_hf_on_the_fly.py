"""from_pretrained with a CrelleConfig quantizes a plain model: the same bits as `crelle quantize`, layer by layer."""

from pathlib import Path

import pytest
import torch
from hf_models import FAMILIES, error, logits, own_logits, write_model
from torch import nn
from transformers import AutoModelForCausalLM

from crelle import CrelleConfig, quantize
from crelle.errors import SchemeError, UnsupportedError
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.integrations.transformers import CrelleLinear
from crelle.integrations.transformers.quantizer import require_version


def load(path: Path, *args: object, **options: object) -> nn.Module:
    how = {"quantization_config": CrelleConfig(*args, **options)} if args or options else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **how)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(3)
def test_the_same_bits_as_quantize(family: str, tmp_path: Path) -> None:
    source = write_model(family, tmp_path / "m")
    made = quantize(source, tmp_path / "q", "rtn:bits=4,group=16", overrides={"*att*": "bcq:bits=3,group=16,rounds=1"})
    router = ("mlp.gate",) if "Moe" in FAMILIES[family][0] or family == "mixtral" else ()
    flies = load(source, "rtn:bits=4,group=16", {"*att*": "bcq:bits=3,group=16,rounds=1"})
    flies.save_pretrained(tmp_path / "s")
    ours, theirs = Checkpoint(tmp_path / "s"), Checkpoint(made.out)
    same = [m for m in theirs.specs if not m.endswith((*router, "block_sparse_moe.gate"))]
    assert len(same) > 8
    for module in same:
        assert ours.specs[module] == theirs.specs[module], module
        a, b = ours.matrix(module).tensors(), theirs.matrix(module).tensors()
        assert all(torch.equal(a[part], b[part]) for part in b), module
    assert torch.equal(logits(load(tmp_path / "s")), logits(flies))


def test_read_by_our_engine(tmp_path: Path) -> None:
    for family in ("gpt2", "gemma3"):
        source = write_model(family, tmp_path / family)
        model = load(source, "rtn:bits=4,group=16")
        model.save_pretrained(tmp_path / f"{family}-q")
        assert error(own_logits(tmp_path / f"{family}-q"), logits(model)) < 5e-4


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_embedding(tied: bool, tmp_path: Path) -> None:
    source = write_model("llama", tmp_path / "m", tie_word_embeddings=tied)
    model = load(source, "rtn:bits=4,group=16", {"model.embed_tokens": "rtn:bits=8,group=16"})
    model.save_pretrained(tmp_path / "s")
    assert Checkpoint(tmp_path / "s").specs["model.embed_tokens"]["bits"] == 8
    assert torch.equal(logits(load(tmp_path / "s")), logits(model))
    assert error(own_logits(tmp_path / "s"), logits(model)) < 5e-4


def test_modules_that_stay(tmp_path: Path) -> None:
    source = write_model("llama", tmp_path / "m")
    model = load(source, "rtn:bits=4,group=16", {"*.1.*": "fp16"}, ["down_proj"])
    kinds = {n: isinstance(m, CrelleLinear) for n, m in model.named_modules() if n.endswith("_proj")}
    assert [n for n, ours in kinds.items() if ours] == [n for n in kinds if ".0." in n and "down" not in n]


def test_refusals(tmp_path: Path) -> None:
    source = write_model("llama", tmp_path / "m")
    with pytest.raises(SchemeError, match="make a checkpoint with `crelle quantize"):
        load(source, "gptq:bits=3,group=16")
    with pytest.raises(SchemeError, match="unknown scheme 'int3'"):
        load(source, "int3")
    with pytest.raises(SchemeError, match=r"the override '\*\.up' matches no module"):
        load(source, "rtn:bits=4,group=16", {"*.up": "fp16"})
    with pytest.raises(SchemeError, match="names 'down', which is no module"):
        load(source, "rtn:bits=4,group=16", None, ["down"])
    with pytest.raises(SchemeError, match="CrelleConfig has no setting 'group'"):
        CrelleConfig("rtn:bits=4", group=3)
    with pytest.raises(UnsupportedError, match=r"5\.16 or a later 5\.x, but 4\.57\.1 is installed"):
        require_version("4.57.1")
    model = load(source, "rtn:bits=4,group=16")
    with pytest.raises(UnsupportedError, match="upload that directory"):
        model.save_pretrained(tmp_path / "s", push_to_hub=True)

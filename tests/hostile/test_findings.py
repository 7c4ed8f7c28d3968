"""What the fuzzer found, each as the smallest input that showed it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from alarm import at_most

from crelle.bench.load.trace import read_trace
from crelle.bench.planner.plan_shapes import LARGE, MAX_EXPERTS, describe
from crelle.cli.commands.ablate import _known
from crelle.engine.generation_config import recommended_sampling
from crelle.errors import MAX_MESSAGE, CrelleError, FormatError
from crelle.eval.tasks.spec import parse_spec
from crelle.formats.dense import DenseTensor
from crelle.formats.storage.checkpoint_writer import CheckpointWriter
from crelle.formats.storage.open import open_quantized
from crelle.quantizers.pipeline import _block_losses

SHARD = "crelle-00001-of-00001.safetensors"


def test_a_message_that_quotes_a_long_name_is_short_and_keeps_its_ends() -> None:
    with pytest.raises(CrelleError) as e:
        open_quantized(Path("m"), {}, {"quant_method": "x" * 10**6})
    assert len(str(e.value)) <= MAX_MESSAGE
    assert str(e.value).startswith("m is quantized by 'xxx")
    assert str(e.value).endswith("and GGUF)")


def test_a_message_that_fits_is_whole() -> None:
    assert str(CrelleError("x" * MAX_MESSAGE)) == "x" * MAX_MESSAGE


@pytest.mark.parametrize("count", [MAX_EXPERTS + 1, 10**7, 10**18, 10**400])
def test_more_experts_than_a_model_has_are_refused_before_they_are_listed(count: int) -> None:
    with pytest.raises(FormatError, match="a layer has at most 4,096 experts, got "):
        describe("m", {**LARGE["mixtral-8x7b"], "num_local_experts": count})


def test_layers_with_many_experts_are_counted_not_listed() -> None:
    config = {**LARGE["mixtral-8x7b"], "num_hidden_layers": 4096, "num_local_experts": 2048}
    with at_most(20, TimeoutError("it lists every expert of every layer")):
        shape = describe("m", config)
    assert sum(m.count for m in shape.matrices if m.expert) == 4096 * 2048 * 3


def journal_of(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    with CheckpointWriter(tmp_path / "out", {"a": 1}) as writer:
        writer.add(SHARD, {"m": DenseTensor(torch.ones(2, 4))}, {}, ["odd"])
    file = writer.partial / "progress.json"
    return file, json.loads(file.read_text())


@pytest.mark.parametrize(
    "facts",
    [
        8,
        {"sha256": None},
        {"bytes": "9"},
        {"specs": -1},
        {"specs": {"m": {"format": ["dense"]}}},
        {"specs": {"m": {"format": "x", "shape": [2, 4]}}},
        {"specs": {"m": {"format": "dense", "shape": [2, 10**400]}}},
        {"names": 5},
        {"warnings": 0.5},
        {"warnings": [5]},
    ],
)
def test_a_shard_that_the_journal_misdescribes_is_made_again(facts: Any, tmp_path: Path) -> None:
    file, journal = journal_of(tmp_path)
    journal["shards"][SHARD] = {**journal["shards"][SHARD], **facts} if isinstance(facts, dict) else facts
    file.write_text(json.dumps(journal))
    with CheckpointWriter(tmp_path / "out", {"a": 1}, resume=True) as writer:
        assert not writer.has(SHARD)
        assert writer.all_warnings() == ()


def test_a_shard_that_the_journal_describes_is_taken_up(tmp_path: Path) -> None:
    journal_of(tmp_path)
    with CheckpointWriter(tmp_path / "out", {"a": 1}, resume=True) as writer:
        assert writer.has(SHARD)
        assert writer.all_warnings() == ("odd",)
        assert writer.contents(SHARD)[0]["m"].dequantize().tolist() == torch.ones(2, 4).tolist()


@pytest.mark.parametrize("blocks", ["mixed", 5, {"0": 1}, {"0": ["x"]}])
def test_losses_that_are_none_are_a_sentence(blocks: Any, tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text(json.dumps({"blocks": blocks}))
    with pytest.raises(FormatError, match="does not contain training losses"):
        _block_losses(tmp_path)


@pytest.mark.parametrize("rows", [5, [5], [{"name": "a"}], [{"x": 1}]])
def test_rows_that_are_none_of_an_ablation_are_a_sentence(rows: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"rows": rows}))
    with pytest.raises(CrelleError, match="is not an ablation result"):
        _known(tmp_path / "a.json", {})


@pytest.mark.parametrize("name", ["top_k", "temperature"])
def test_a_sampling_setting_of_400_digits_is_a_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({name: 10**400}))
    weights: Any = SimpleNamespace(path=tmp_path)
    with pytest.raises(FormatError, match=f"'{name}' must be a"):
        recommended_sampling(weights)


@pytest.mark.parametrize("field", ["x" * 200_000, "1e999", "nan", "9" * 5000])
def test_a_trace_with_such_a_field_is_a_sentence(field: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"seconds,prompt,tokens\n{field},1,2\n")
    with pytest.raises(FormatError, match=r"cannot be read as a trace|line 2: expected arrival"):
        read_trace(tmp_path / "t.csv", context=64)


def test_yaml_that_names_itself_many_times_is_shown_in_a_few_characters(tmp_path: Path) -> None:
    levels = [f"- &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]" for i in range(9)]
    (tmp_path / "t.yaml").write_text("\n".join(["- &a [x, x, x, x, x, x, x, x, x]", *levels]))
    with (
        at_most(20, TimeoutError("it writes out what the aliases mean")),
        pytest.raises(FormatError, match=r"should hold settings .* a list of 10 entries"),
    ):
        parse_spec("t", tmp_path / "t.yaml", tmp_path)

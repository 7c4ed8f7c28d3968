"""The planner: sizes of shapes, sharing out of memory and GPUs, what a step does."""

from typing import Any

import pytest

from crelle.bench.model_shapes import SHAPES, RandomWeights
from crelle.bench.planner.cost import CostModel
from crelle.bench.planner.plan import parallel, plan, step_work, vllm_command
from crelle.bench.planner.plan_shapes import NAMES, describe, planned_shape
from crelle.bench.planner.step_model import kind_of, milliseconds
from crelle.errors import CapacityError, FormatError, SchemeError
from crelle.formats.kv.pages import KVFormat
from crelle.quantizers.scheme import parse

BILLIONS = {
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
    "llama3-405b": 405.85,
    "mixtral-8x7b": 46.70,
    "qwen3-30b-a3b": 30.53,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
}
BCQ = parse("bcq:bits=3,group=128")


def made(model: str = "llama3-8b", scheme: str = "bcq:bits=3,group=128", kv: str = "4", **options: Any) -> Any:
    return plan(planned_shape(model), parse(scheme), KVFormat.parse(kv), **options)


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_are_the_published_number(name: str) -> None:
    assert planned_shape(name).parameters / 1e9 == pytest.approx(BILLIONS[name], abs=0.01)


@pytest.mark.parametrize("scheme", ["fp16", "rtn:bits=4,group=128", "bcq:bits=3,group=128", "atom:w=4,a=4"])
@pytest.mark.parametrize("name", ["llama2-7b", "opt-6.7b", "gpt2-xl", "gemma3-4b"])
def test_bytes_are_those_of_random_weights(name: str, scheme: str) -> None:
    shape = planned_shape(name)
    assert shape.stored_bytes(parse(scheme)) + 2 * shape.outside == pytest.approx(
        RandomWeights(name, scheme).nbytes(), rel=1e-3
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_shape_has_a_plan(name: str) -> None:
    found = made(name, "rtn:bits=4,group=32", gpus=8, memory="141GB", cost=CostModel(240000.0, 5600.0))
    assert found.fits
    assert found.estimate.tokens_per_second > 0
    assert found.estimate.cost.total > 0
    assert found.bytes_per_gpu == found.weight_bytes + found.working_bytes + found.cache_bytes <= found.memory_bytes


def test_one_more_sequence_does_not_fit() -> None:
    most = made(memory="10GB").most_sequences
    assert made(memory="10GB", batch=most).fits
    over = made(memory="10GB", batch=most + 1)
    assert not over.fits
    assert over.estimate is None
    assert f"{most} would fit" in over.why_not


def test_fewer_bits_hold_more_and_decode_faster() -> None:
    three, plain = made(memory="24GB", batch=1), made(memory="24GB", batch=1, scheme="fp16", kv="16")
    assert three.tokens > plain.tokens
    assert three.estimate.tokens_per_second > plain.estimate.tokens_per_second


def test_gpus_share_out_heads_then_layers() -> None:
    shape = planned_shape("llama3-70b")
    assert [parallel(shape, n) for n in (1, 2, 8, 16, 6)] == [(1, 1), (2, 1), (8, 1), (8, 2), (2, 3)]
    assert made("llama3-70b", gpus=8).weight_bytes == pytest.approx(made("llama3-70b", gpus=1).weight_bytes / 8)
    with pytest.raises(SchemeError, match="cannot share out"):
        parallel(shape, 7919)


def test_inputs_that_cannot_be_split_are_gathered() -> None:
    talk = {s: made(scheme=s, gpus=2).estimate.communication_ms for s in ("rtn:bits=4,group=128", "atom:w=4,a=16")}
    assert talk["atom:w=4,a=16"] > 1.5 * talk["rtn:bits=4,group=128"]


def test_command_for_vllm_names_both_kinds_of_sharing() -> None:
    command = vllm_command(made("llama3-405b", gpus=16, memory="80GB"), "DIR")
    assert command.startswith("vllm serve DIR --tensor-parallel-size 8 --pipeline-parallel-size 2 --max-model-len 2048")
    assert command.endswith("--distributed-executor-backend ray")
    assert "parallel" not in vllm_command(made(), "DIR")


def test_one_token_reads_only_its_experts() -> None:
    shape = planned_shape("mixtral-8x7b")
    one, many = (step_work(shape, BCQ, KVFormat(), n, 128).products[1] for n in (1, 256))
    assert one.bytes == pytest.approx(shape.stored_bytes(BCQ, expert=True) * 2 / 8)
    assert many.bytes == pytest.approx(shape.stored_bytes(BCQ, expert=True))
    assert one.rows == pytest.approx(1)
    assert many.rows == pytest.approx(64)


def test_windows_bound_what_attention_reads() -> None:
    shape = planned_shape("gemma3-4b")
    long, longer = (sum(step_work(shape, BCQ, KVFormat(), 1, n).cache.values()) for n in (1024, 32768))
    assert long < longer < 32 * long


@pytest.mark.parametrize("scheme", ["fp16", "bcq:bits=3,group=128", "atom:w=4,a=4", "atom:w=8,a=8", "atom:levels=2"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_step_never_takes_no_time_and_long_contexts_take_more(scheme: str, exact: bool) -> None:
    shape, kv = planned_shape("llama2-7b"), KVFormat.parse("3")
    for batch in (1, 2, 5, 32, 33, 300):
        times = [
            milliseconds(step_work(shape, parse(scheme), kv, batch, n, batch_invariant=exact)) for n in (128, 4096)
        ]
        assert 0 < times[0] < times[1]


def test_kinds_of_weights() -> None:
    schemes = ("bf16", "mixed", "awq:bits=4,group=128", "atom:w=4,a=4", "atom:w=8,a=8", "atom:w=4,a=8,levels=2")
    assert [kind_of(parse(s)) for s in schemes] == ["dense", "coded", "coded", "integer4", "integer8", "two-level"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpus": 0}, "at least one GPU"),
        ({"batch": 0}, "at least one sequence"),
        ({"context": 9000}, "1 to 8192 tokens"),
        ({"memory": "lots"}, "must look like 24GB"),
        ({"bandwidth": float("inf")}, "positive number"),
        ({"bandwidth": float("nan")}, "positive number"),
    ],
)
def test_bad_options_are_a_sentence(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SchemeError, match=says):
        made(**options)


def test_memory_below_one_layer_is_a_sentence() -> None:
    with pytest.raises(CapacityError, match="one layer of llama3-405b"):
        made("llama3-405b", memory="100MB")


def test_configs_that_cannot_be_described_are_a_sentence() -> None:
    with pytest.raises(FormatError, match="does not know models of type 't5'"):
        describe("m", {"model_type": "t5"})
    small = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    with pytest.raises(FormatError, match="a 'bert' model is an encoder, and the planner plans decoding"):
        describe("m", {"model_type": "bert", "vocab_size": 8, **small})
    with pytest.raises(FormatError, match="needs whole numbers"):
        describe("m", {**SHAPES["llama2-7b"], "num_local_experts": 8})


def test_an_estimate_says_what_was_not_measured() -> None:
    assert made("llama2-7b").estimate.unchecked == ()
    found = made("mixtral-8x7b", "mixed", "3", gpus=2, bandwidth=1500.0, batch=2).estimate.unchecked
    assert len(found) == 6

"""The planner for mixtures of experts larger than a GPU."""

from typing import Any

import pytest
from in_process import run, succeed

from crelle.bench.planner.plan import plan
from crelle.bench.planner.plan_shapes import planned_shape
from crelle.engine.memory.experts import reserved_bytes
from crelle.errors import SchemeError
from crelle.formats.kv.pages import KVFormat
from crelle.quantizers.scheme import parse

SCHEME = parse("rtn:bits=4,group=128")


def made(model: str = "qwen3-30b-a3b", **options: Any) -> Any:
    return plan(planned_shape(model), SCHEME, KVFormat.parse("16"), **options)


@pytest.mark.parametrize("memory", ["4GB", "8GB", "12GB", "16GB"])
def test_what_is_planned_fits_the_memory(memory: str) -> None:
    found = made(memory=memory)
    s = found.streamed
    assert not found.fits
    assert s.fewest_slots <= s.most_slots <= s.fewest_slots + 1
    outside = found.weight_bytes - s.host_bytes
    reserved = reserved_bytes(planned_shape("qwen3-30b-a3b").spec, KVFormat.parse("16"), found.memory_bytes)
    used = outside + s.slot_bytes + s.staging_bytes + reserved
    assert found.memory_bytes - 2 * s.expert_bytes < used <= found.memory_bytes  # rounding of weight_bytes
    assert s.host_bytes == s.expert_bytes * 48 * 128


def test_bytes_and_speed_follow_the_share_of_hits() -> None:
    rows = [made(memory="8GB", hits=h).streamed.speeds for h in (0.0, 0.5, 1.0)]
    assert all(len(row) == 1 for row in rows)
    none, half, every = (row[0] for row in rows)
    size = made(memory="8GB").streamed.expert_bytes
    assert none.pcie_bytes_per_step == 48 * 8 * size
    assert half.pcie_bytes_per_step == none.pcie_bytes_per_step / 2
    assert every.pcie_bytes_per_step == 0
    assert none.gpu_bytes_per_step < half.gpu_bytes_per_step < every.gpu_bytes_per_step
    assert none.tokens_per_second < 40e9 / none.pcie_bytes_per_step  # the bound by PCIe
    assert every.tokens_per_second == pytest.approx(made(memory="80GB", batch=1).estimate.tokens_per_second, rel=0.01)
    slow = made(memory="8GB", hits=0.0, pcie=20.0).streamed.speeds[0]
    assert slow.milliseconds_per_step - none.milliseconds_per_step == pytest.approx(none.pcie_bytes_per_step / 40e6)


def test_many_sequences_read_an_expert_once() -> None:
    size = made(memory="8GB").streamed.expert_bytes
    few, many = (made(memory="8GB", batch=n, hits=0.0).streamed.speeds[0].pcie_bytes_per_step for n in (16, 200))
    assert few == pytest.approx(48 * 128 * (1 - (15 / 16) ** 16) * size, rel=1e-4)
    assert many == pytest.approx(48 * 128 * size, rel=1e-4)


def test_by_chance_as_many_hit_as_fit() -> None:
    s = made(memory="8GB").streamed
    assert s.fewest_slots / 128 <= s.by_chance <= s.most_slots / 128
    assert s.speeds[0].share_of_hits == s.by_chance
    assert [speed.share_of_hits for speed in s.speeds[1:]] == [0.5, 0.75, 0.9]


def test_models_that_fit_or_have_no_experts_are_not_streamed() -> None:
    assert made(memory="80GB").streamed is None
    assert made(memory="24GB", batch=200).streamed is None  # for want of a cache, not of room for weights
    assert made("llama3-70b", memory="10GB").streamed is None
    assert made(memory="8GB", gpus=2).streamed is None


def test_what_does_not_fit_even_so_says_why() -> None:
    s = made(memory="2GB").streamed
    assert "the weights outside the experts take 1.7" in s.why_not
    assert s.speeds == ()


@pytest.mark.parametrize(("option", "said"), [({"hits": 1.1}, "between 0 and 1, not 1.1"), ({"pcie": 0.0}, "not 0")])
def test_bad_numbers_are_refused(option: dict[str, float], said: str) -> None:
    with pytest.raises(SchemeError, match=said):
        made(memory="8GB", **option)


def test_the_command_prints_it() -> None:
    args = ("plan", "qwen3-30b-a3b", "--scheme", "rtn:bits=4,group=128", "--memory")
    shown = " ".join(succeed(*args, "8GB").out.split())
    assert "39 to 40 of 128 experts of each layer on the GPU (4.62 GB)" in shown
    assert "(by chance)" in shown
    assert "predicted" in shown
    assert "does not fit either" in " ".join(succeed(*args, "2GB").out.split())
    found = succeed(*args, "8GB", "--hits", 0.8, "--pcie", 25, "--json").json["streamed"]
    assert [row["share_of_hits"] for row in found["speeds"]] == [0.8]
    assert found["pcie_gb_per_s"] == 25
    assert "between 0 and 1" in run(*args, "8GB", "--hits", 2).err

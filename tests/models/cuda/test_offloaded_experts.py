"""A model that is built with its experts in host memory: on a CPU, where only the place of the bytes differs."""

import pytest
import torch

from crelle.bench.model_shapes import RandomWeights, llama_config
from crelle.engine.memory import experts as sharing
from crelle.engine.memory.experts import expert_offload, expert_uses, offload_of, reserved_bytes
from crelle.engine.memory.machine import FreeMemory
from crelle.engine.memory.plan import weight_bytes
from crelle.errors import CapacityError
from crelle.formats.kv.pages import KVFormat
from crelle.kernels.cuda.experts.host_memory import ExpertOffload, HostKernel, tensors_in
from crelle.models.loader import Model, build, read_spec

CPU = torch.device("cpu")
CONFIG = {
    **llama_config(64, 3, 4, 128, kv_heads=2, vocabulary=300, context=128),
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 32,
}
EXPERT = 3 * 64 * 32 * 4  # bytes, f32


def weights() -> RandomWeights:
    return RandomWeights(CONFIG, "fp16")


def offloaded(room: int, fits: int = 0) -> ExpertOffload:
    return ExpertOffload(room, CPU, fits=fits, host_free=lambda: 1 << 30, used=lambda: 1, pins=False)


def experts_of(model: Model) -> list[object]:
    return [x for layer in model.layers for e in layer.mlp.experts for x in (e.gate, e.up, e.down)]  # type: ignore[union-attr]


def test_logits_are_the_same_and_all_experts_lie_in_blocks() -> None:
    resident = build(weights(), CPU)
    offload = offloaded(2 * 8 * EXPERT + 1 + 3 * 5 * EXPERT)
    model = build(weights(), CPU, offload=offload)
    assert offload.active
    assert offload_of(model) is offload
    assert [layer.slot_count for layer in offload.layers.values()] == [5, 5, 5]
    assert "streamed, 5 of 8 experts of each layer" in str(offload)
    ids = torch.arange(20).view(2, 10)
    assert torch.equal(model(ids, model.new_cache(2)), resident(ids, resident.new_cache(2)))
    memory = [layer.memory for layer in offload.layers.values()]
    for linear in experts_of(model):
        assert isinstance(linear.prepared.kernel, HostKernel)  # type: ignore[attr-defined]
        for t in tensors_in(linear.prepared.data):  # type: ignore[attr-defined]
            assert any(m.data_ptr() <= t.data_ptr() < m.data_ptr() + m.numel() for m in memory if m is not None)
    assert expert_uses(model) == (0, 0)


def test_weights_are_counted_where_they_lie() -> None:
    resident, offload = build(weights(), CPU), offloaded(2 * 8 * EXPERT + 1 + 3 * 5 * EXPERT)
    model = build(weights(), CPU, offload=offload)
    outside = weight_bytes([resident]) - 3 * 8 * EXPERT
    assert weight_bytes([model]) == outside + 3 * 5 * EXPERT + 2 * 8 * EXPERT  # slots, staging


def test_a_model_that_fits_is_built_as_always() -> None:
    offload = offloaded(1 << 30, fits=1)
    model = build(weights(), CPU, offload=offload)
    assert offload_of(model) is None
    assert not any(isinstance(linear.prepared.kernel, HostKernel) for linear in experts_of(model))  # type: ignore[attr-defined]
    assert weight_bytes([model]) == weight_bytes([build(weights(), CPU)])


def test_only_mixtures_on_a_gpu_have_an_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, gpu = KVFormat.parse("16"), torch.device("cuda")
    monkeypatch.setattr(sharing, "free_memory", lambda device: FreeMemory(10**9, "on a test"))
    assert expert_offload(weights(), CPU, "1MB", kv) is None
    dense = RandomWeights(llama_config(64, 1, 4, 128, vocabulary=300, context=128))
    assert expert_offload(dense, gpu, "500MB", kv) is None
    found = expert_offload(weights(), gpu, "800MB", kv)
    assert found is not None
    assert found.room == 800 * 10**6 - reserved_bytes(read_spec(weights()), kv, 800 * 10**6)
    assert found.room < found.fits < 800 * 10**6
    default = expert_offload(weights(), gpu, None, kv)
    assert default is not None
    assert default.fits < 9 * 10**8
    with pytest.raises(CapacityError, match=r"a memory limit of 2 GB is more than the 1 GB free on a test"):
        expert_offload(weights(), gpu, "2GB", kv)


def test_the_cache_gets_its_share_before_experts_do() -> None:
    spec, kv = read_spec(weights()), KVFormat.parse("16")
    small, large = (reserved_bytes(spec, kv, limit) for limit in (10**6, 10**9))
    assert large - small <= 10**9
    pages = 128 // kv.page * 2 * 2 * 16 * kv.page * 2 * 3  # whole context: keys and values, heads, channels, layers
    from crelle.engine.memory.plan import working_bytes_of

    assert large == working_bytes_of(spec, 32, 2048, 2, 128) + pages

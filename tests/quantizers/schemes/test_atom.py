"""Atom: what the quantizer chooses, what each part gains, training through both roundings, and whole models."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from crelle import LLM, CalibrationData, Sampling, quantize
from crelle.cli.commands.inspect import describe
from crelle.errors import SchemeError
from crelle.formats.activations import ActivationSpec
from crelle.formats.base import format_of, nbytes
from crelle.formats.grouped import GroupedTensor
from crelle.formats.kv.pages import KVFormat, as_stored
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import open_weights
from crelle.formats.two_level import TwoLevelTensor
from crelle.models.calibration_model import open_model
from crelle.models.loader import build
from crelle.quantizers.calibration.calibrate import Calibrator
from crelle.quantizers.calibration.stats import InputRounding, Stats, StatsCollector
from crelle.quantizers.scheme import parse
from crelle.quantizers.schemes.atom import Atom
from crelle.quantizers.training.end_to_end import Network
from crelle.quantizers.training.ste import trainable_weight

SMALL = "w=4,a=4,kv=4,group=16,outliers=8"
SCHEMES = (
    f"atom:{SMALL}",
    "atom:w=3,a=3,group=24,outliers=5",
    "atom:w=4,a=8,group=16,outliers=8,levels=2",
    "atom:w=4,a=4,group=16,outliers=8,levels=2",
    "atom:w=8,a=8,group=128,outliers=0",
    "atom:w=4,a=16,group=row,outliers=8",
    "atom:w=4,a=4,group=row,outliers=0,clip=false,gptq=false",
    "atom:w=4,a=4,group=16,outliers=8,outlier_bits=16",
)


def inputs(T: int, K: int, seed: int = 0) -> Tensor:
    """Correlated inputs, some channels of which are far larger than the others."""
    random = torch.Generator().manual_seed(seed)
    mix = torch.eye(K) + 0.3 * torch.randn(K, K, generator=random) / K**0.5
    size = torch.exp(0.5 * torch.randn(K, generator=random))
    size[torch.randperm(K, generator=random)[: K // 16]] *= 20
    return (torch.randn(T, K, generator=random) @ mix) * size


def layer(N: int, K: int, seed: int = 0) -> tuple[Tensor, Tensor, Stats]:
    x = inputs(4 * K, K, seed)
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(seed + 1)) / K**0.5
    collector = StatsCollector(K)
    collector.add(x)
    return w, x, collector.stats()


def fitted(scheme: str, w: Tensor, x: Tensor, stats: Stats) -> GroupedTensor | TwoLevelTensor:
    """Fit as a layer's calibration does: the input's rounding first, then the weight to the rounded input."""
    config = parse(scheme)
    assert isinstance(config, Atom)
    if (rounding := config.rounding(stats)) is None:
        return config.fit(w, stats)
    collector = StatsCollector(len(stats.hessian), cross=True)
    collector.add(rounding(x), x)
    seen = collector.stats()
    hessian, cross = seen.hessian, seen.cross
    return config.fit(w, Stats(hessian, seen.absmean, seen.tokens, cross, rounding=rounding))


def error(scheme: str, w: Tensor, x: Tensor, stats: Stats) -> float:
    found = fitted(scheme, w, x, stats)
    y = found.round_input(x) @ found.dequantize().T
    return float((y - x @ w.T).square().sum() / (x @ w.T).square().sum())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("N", "K"), [(24, 64), (5, 83), (17, 8)])
def test_any_shape_is_stored_as_foretold(scheme: str, N: int, K: int) -> None:
    w, x, stats = layer(N, K)
    found, spec = fitted(scheme, w, x, stats), parse(scheme).storage((N, K))
    again = type(found).from_parts(found.spec(), found.tensors())
    assert torch.equal(again.dequantize(), found.dequantize())
    if found.activation is not None:
        spec["activation"]["clip"] = found.activation.clip
    assert found.spec() == spec
    assert N * format_of(spec).row_bits(spec) == 8 * nbytes(found) - 32 * K
    assert stats.output_error(w - found.dequantize()) < 0.3 * stats.output_error(w)


def test_outliers_are_the_channels_with_the_largest_activations() -> None:
    w, x, stats = layer(24, 64)
    found = fitted(f"atom:{SMALL}", w, x, stats)
    assert found.perm is not None
    energy = x.square().sum(0)
    assert set(found.perm[-8:].tolist()) == set(energy.topk(8).indices.tolist())
    assert bool((energy[found.perm.long()].diff() >= 0).all())
    change = (found.dequantize() - w).abs()[:, found.perm.long()]
    assert float(change[:, -8:].mean()) < 0.7 * float(change[:, :-8].mean())


def test_every_part_lowers_the_error() -> None:
    w, x, stats = layer(64, 256)
    plain = "group=row,outliers=0,clip=false,gptq=false"
    steps = {
        "plain": plain,
        "floats": "group=row,outliers=16,outlier_bits=16,clip=false,gptq=false",
        "outliers": "group=row,outliers=16,clip=false,gptq=false",
        "groups": "group=32,outliers=16,clip=false,gptq=false",
        "clip": "group=32,outliers=16,gptq=false",
        "gptq": "group=32,outliers=16",
    }
    found = {name: error(f"atom:w=4,a=4,{s}", w, x, stats) for name, s in steps.items()}
    assert found["floats"] < 0.3 * found["plain"]
    assert found["outliers"] < 1.05 * found["floats"]
    assert found["groups"] < 0.9 * found["outliers"]
    assert found["clip"] < found["groups"]
    assert found["gptq"] < 0.95 * found["clip"]
    assert error("atom:w=4,a=8,group=32,outliers=16", w, x, stats) < 0.7 * found["gptq"]
    assert error("atom:w=4,a=8,group=32,outliers=16,levels=2", w, x, stats) < 0.7 * found["gptq"]
    assert error("atom:w=8,a=8,group=32,outliers=16", w, x, stats) < 1e-3


@pytest.mark.parametrize("levels", [1, 2])
def test_rotated_blocks_lose_less_of_inputs_with_long_tails(levels: int) -> None:
    """Inputs as down has them: now and then a value is far larger than its channel's others."""
    w, x, _ = layer(48, 144)
    x = torch.randn(600, 144, generator=torch.Generator().manual_seed(2)).pow(3) * x.std(0)
    collector = StatsCollector(144)
    collector.add(x)
    scheme = f"atom:w=4,a=4,group=128,outliers=16,levels={levels}"
    rotated, plain = (error(f"{scheme}{more}", w, x, collector.stats()) for more in ("", ",hadamard=false"))
    assert rotated < 0.7 * plain
    assert fitted(scheme, w, x, collector.stats()).spec()["activation"]["hadamard"]
    assert "hadamard" not in fitted(scheme + ",hadamard=false", w, x, collector.stats()).spec()["activation"]


def test_one_input_has_one_rounding_and_its_clip_is_searched() -> None:
    _, _, stats = layer(8, 256)
    config = Atom(group=128, outliers=16)
    first = config.rounding(stats)
    assert isinstance(first, InputRounding)
    assert config.rounding(stats) is first
    assert first.spec.clip < 1
    assert Atom(group=128, outliers=16, clip=False).rounding(stats).spec.clip == 1.0  # type: ignore[union-attr]
    assert Atom(a=16).rounding(stats) is None


def test_weights_of_zero_and_inputs_that_are_never_seen() -> None:
    w, _, stats = layer(20, 64)
    w[3], w[:, 16:32] = 0, 0
    hessian = stats.hessian.clone()
    hessian[40:48], hessian[:, 40:48] = 0, 0
    for scheme in SCHEMES:
        found = parse(scheme).fit(w, Stats(hessian, stats.absmean, stats.tokens)).dequantize()
        assert bool(found.isfinite().all())
        assert float(found[3].abs().max()) < 1e-3


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("atom:w=5", "w must be 3, 4 or 8"),
        ("atom:a=2", "a must be 3, 4, 8 or 16"),
        ("atom:kv=5", "a KV cache must be one of"),
        ("atom:outliers=-1", "outliers must be at least 0"),
        ("atom:levels=2,w=8", "2 with w=4"),
        ("atom:bits=3", "has no setting 'bits'"),
        ("atom:group=0", "group must be at least 1"),
    ],
)
def test_bad_settings_are_sentences(scheme: str, words: str) -> None:
    with pytest.raises(SchemeError, match=words):
        parse(scheme)


def test_the_scheme_is_written_as_it_is_read() -> None:
    whole = "atom:w=4,a=4,kv=4,group=128,outliers=128"
    assert str(parse(whole)) == whole
    assert str(parse("atom:levels=2,a=8,clip=false")) == "atom:w=4,a=8,kv=16,group=128,outliers=128,levels=2,clip=false"


# Training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_training_begins_where_the_quantizer_ended(scheme: str) -> None:
    w, x, stats = layer(12, 83)
    start = fitted(scheme, w, x, stats)
    for module in (trainable_weight(start, None), trainable_weight(start, w)):
        assert module is not None
        torch.testing.assert_close(module().detach(), start.dequantize(), rtol=1e-5, atol=1e-6)
        again = module.export()
        assert again.spec() == start.spec()
        assert all(torch.equal(t, start.tensors()[name]) for name, t in again.tensors().items())


@pytest.mark.parametrize("levels", [1, 2])
def test_training_lowers_the_error_and_stores_what_it_trained(levels: int) -> None:
    w, x, _ = layer(24, 64)
    random = torch.Generator().manual_seed(3)
    x = torch.randn(256, 12, generator=random) @ torch.randn(12, 64, generator=random) + 0.3 * x  # errors can cancel
    collector = StatsCollector(64)
    collector.add(x)
    start = fitted(f"atom:w=4,a=8,group=16,outliers=8,gptq=false,levels={levels}", w, x, collector.stats())
    module = trainable_weight(start, w)
    assert module is not None
    optimizer = torch.optim.Adam(module.parameters(), lr=2e-3)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=150)
    seen, goal = start.round_input(x), x @ w.T
    losses = []
    for _ in range(150):
        loss = (seen @ module().T - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        decay.step()
        losses.append(float(loss.detach()))
    assert min(losses[-10:]) < 0.6 * losses[0]
    after = module.export()
    torch.testing.assert_close(after.dequantize(), module().detach(), rtol=1e-5, atol=1e-6)


# Whole models ------------------------------------------------------------------------------------------------------

TEXT = CalibrationData(text="The quick brown fox jumps over the lazy dog. " * 80, rows=6, length=64)


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[2], f"atom:{SMALL},tune=short,steps=4"])
@pytest.mark.sample(2)
def test_a_model_is_quantized_and_runs(tiny_model: Path, tmp_path: Path, scheme: str) -> None:
    quantize(tiny_model, tmp_path / "q", scheme, text=TEXT, device="cpu")
    made = Checkpoint(tmp_path / "q")
    assert made.scheme == str(parse(scheme))
    w = made.matrix("model.layers.0.mlp.down_proj")
    assert isinstance(w, GroupedTensor | TwoLevelTensor)
    assert isinstance(w.activation, ActivationSpec)
    names = [f"model.layers.0.self_attn.{kind}_proj" for kind in "qkv"]
    q, k, v = (made.matrix(name) for name in names)
    assert q.activation == k.activation == v.activation  # type: ignore[attr-defined]
    assert torch.equal(q.perm, k.perm)  # type: ignore[attr-defined]
    facts = describe(tmp_path / "q")
    assert any((one["activation"] or "").startswith(str(w.activation)) for one in facts["layers"])
    llm = LLM.load(tmp_path / "q", device="cpu")
    kernels = {linear.kernel for linear in llm.model.linears()}
    assert "cpu-integer" in kernels or "integer-reference" in kernels
    assert len(llm.generate("a", Sampling(temperature=0, max_tokens=8)).tokens) <= 8


def test_calibration_sees_what_the_kernel_computes(tiny_model: Path, tmp_path: Path) -> None:
    quantize(tiny_model, tmp_path / "q", SCHEMES[0], text=TEXT, device="cpu")
    weights = open_weights(tmp_path / "q")
    network = Network.of(open_model(weights))
    tokens = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        seen = network.model.logits(network.hidden(tokens))
    served = build(weights, torch.device("cpu"), dtype=torch.float32)
    close = torch.isclose(seen, served(tokens, served.new_cache(2)), rtol=1e-3, atol=1e-3).all(-1)
    assert close.float().mean() >= 0.9  # an activation halfway between two integers may take either
    mlp = served.layers[0].mlp
    assert mlp.down.weight.perm is None  # folded into gate and up
    up, down = (Checkpoint(tmp_path / "q").matrix(linear.name) for linear in (mlp.up, mlp.down))
    assert torch.equal(mlp.up.weight.dequantize(), up.dequantize()[down.perm.long()])  # type: ignore[attr-defined]
    # bf16 products, where the CPU has them, take another integer for activations that lie halfway between two
    calibrator = Calibrator(open_model(open_weights(tiny_model)), tokens, half=False)
    fitted_now = {n: Checkpoint(tmp_path / "q").matrix(n) for n in network.blocks[0].linears()}
    calibrator.skip(fitted_now, {n: Checkpoint(tmp_path / "q").read(n) for n in network.blocks[0].vectors()})
    with torch.no_grad():
        torch.testing.assert_close(calibrator.hidden.quantized, network.blocks[0](network.model.embed(tokens)))


def test_calibration_reads_the_cache_as_it_is_served(tiny_model: Path) -> None:
    weights, kv = open_weights(tiny_model), KVFormat.parse("kv4:center=false")
    tokens = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    network = Network.of(open_model(weights))
    for block in network.blocks:
        block.round_cache(kv, network.model.embed(tokens))
    with torch.no_grad():
        seen = network.model.logits(network.hidden(tokens))
    served = build(weights, torch.device("cpu"), dtype=torch.float32)
    torch.testing.assert_close(seen, served(tokens, served.new_cache(2, kv=kv)), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(seen, served(tokens, served.new_cache(2)), rtol=1e-3, atol=1e-3)
    x = torch.randn(3, 2, 16, requires_grad=True)
    as_stored(x, kv.key).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(x.grad, torch.ones_like(x))  # type: ignore[arg-type]
    calibrator = Calibrator(open_model(weights), tokens, kv=KVFormat.parse(4))
    layer = calibrator.begin()
    with torch.no_grad():
        error = (layer.block(layer.hidden.full) - layer.after).square().mean() / layer.after.square().mean()
    assert 0 < float(error) < 0.05

"""2 and 4 bits in one matrix: what the quantizer chooses, what refinement gains, and training through the rounding."""

from pathlib import Path

import pytest
import torch
from conftest import write_tiny_model
from torch import Tensor

from crelle import LLM, CalibrationData, Sampling, quantize
from crelle.errors import SchemeError
from crelle.formats.base import bits_per_weight, nbytes
from crelle.formats.mixed import MixedTensor
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.quantizers.calibration.stats import Stats, StatsCollector
from crelle.quantizers.scheme import parse
from crelle.quantizers.schemes.mixed import Mixed
from crelle.quantizers.training.mixed_ste import STEMixed


def layer(N: int, K: int, seed: int = 0) -> tuple[Tensor, Stats]:
    """A weight with some large values, and inputs that are correlated and of very different sizes."""
    random = torch.Generator().manual_seed(seed)
    mix = torch.eye(K) + 0.3 * torch.randn(K, K, generator=random) / K**0.5
    x = (torch.randn(4 * K, K, generator=random) @ mix) * torch.exp(0.7 * torch.randn(K, generator=random))
    w = torch.randn(N, K, generator=random) / K**0.5
    w *= 1 + 4 * (torch.rand(N, K, generator=random) < 0.004)
    collector = StatsCollector(K)
    collector.add(x)
    return w, collector.stats()


def error(scheme: str, w: Tensor, stats: Stats) -> float:
    return stats.output_error(w - parse(scheme).fit(w, stats).dequantize()) / stats.output_error(w)


@pytest.mark.parametrize(("N", "K"), [(64, 128), (40, 200), (5, 67), (17, 16), (33, 8)])
@pytest.mark.parametrize("group", [8, 16, 32, 64])
def test_any_shape_is_stored_as_foretold(N: int, K: int, group: int) -> None:
    w, stats = layer(N, K)
    config = Mixed(group=group, outliers=0.004)
    found = config.fit(w, stats)
    assert found.spec() == config.storage((N, K))
    assert 0 <= N * MixedTensor.row_bits(config.storage((N, K))) - 8 * nbytes(found) < N
    again = MixedTensor.from_parts(found.spec(), found.tensors())
    assert torch.equal(again.dequantize(), found.dequantize())
    assert stats.output_error(w - found.dequantize()) < 0.25 * stats.output_error(w)


def test_sensitive_groups_have_4_bits_and_outliers_lie_in_the_others() -> None:
    w, stats = layer(96, 256)
    found = Mixed(outliers=0.005).fit(w, stats)
    inverse = torch.linalg.inv(
        stats.hessian.double() + 0.01 * stats.hessian.diagonal().mean() * torch.eye(256)
    ).diagonal()
    score = (w.double().square() / inverse.square()).sum(0).reshape(16, 16).sum(1)
    assert set(score.topk(4).indices.tolist()) == set(found.four.nonzero()[:, 0].tolist())
    rows, columns = found.outlier_places()
    assert len(rows) == round(0.005 * 96 * 256)
    assert not found.four[columns // 16].any()
    change = (found.dequantize() - w).abs()
    assert float(change[rows, columns].mean()) < 0.5 * float(change.mean())


def test_every_part_lowers_the_error() -> None:
    w, stats = layer(128, 256)
    # The error is on the calibration inputs themselves, which damping does not go by.
    found = {
        s: error(f"mixed:damp=0.01,{s}", w, stats) for s in ("outliers=0", "refine=0", "refine=2", "four=0", "four=1")
    }
    assert found["refine=2"] < 0.97 * found["refine=0"]
    assert found["refine=2"] < 0.97 * found["outliers=0"]
    assert found["four=1"] < 0.5 * found["refine=2"] < 0.5 * found["four=0"]


def test_rankings_beat_chance() -> None:
    total = dict.fromkeys(("sensitivity", "range", "random"), 0.0)
    for seed in range(4):
        w, stats = layer(64, 256, seed)
        w = w * torch.exp(0.5 * torch.randn(256, generator=torch.Generator().manual_seed(seed)))
        for rank in total:
            total[rank] += error(f"mixed:rank={rank}", w, stats)
    assert total["sensitivity"] < 0.97 * total["random"]
    assert total["range"] < 0.97 * total["random"]


def test_weights_of_zero_and_inputs_that_are_never_seen() -> None:
    w, stats = layer(20, 64)
    w[3], w[:, 16:32] = 0, 0
    hessian = stats.hessian.clone()
    hessian[40:48], hessian[:, 40:48] = 0, 0
    found = Mixed().fit(w, Stats(hessian, stats.absmean, stats.tokens)).dequantize()
    assert bool(found.isfinite().all())
    assert float(found[3].abs().max()) < 1e-3


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("mixed:four=1.5", "must be 0 to 1"),
        ("mixed:outliers=0.1", "must be 0 to 0.015"),
        ("mixed:group=24", "one of 8, 16, 32, 64"),
        ("mixed:rank=best", "rank must be"),
        ("mixed:bits=3", "has no setting 'bits'"),
    ],
)
def test_bad_settings_are_sentences(scheme: str, words: str) -> None:
    with pytest.raises(SchemeError, match=words):
        parse(scheme)


def test_the_scheme_is_written_as_it_is_read() -> None:
    assert str(parse("mixed:four=0.1,outliers=0.002,group=16")) == "mixed:group=16,four=0.1"
    assert str(parse(str(parse("mixed:rank=range,exclusive=false")))) == "mixed:group=16,rank=range,exclusive=false"


@pytest.mark.parametrize(("N", "K", "four"), [(40, 128, 0.25), (17, 70, 0.5), (16, 64, 0.0), (16, 64, 1.0)])
def test_training_begins_where_the_quantizer_ended(N: int, K: int, four: float) -> None:
    w, stats = layer(N, K)
    start = Mixed(four=four, outliers=0.0 if four == 1 else 0.004).fit(w, stats)
    for module in (STEMixed(start), STEMixed(start, w)):
        torch.testing.assert_close(module().detach(), start.dequantize(), rtol=1e-5, atol=1e-6)
        again = module.export()
        torch.testing.assert_close(again.dequantize(), start.dequantize(), rtol=1e-3, atol=1e-4)
        assert MixedTensor.from_parts(again.spec(), again.tensors()).spec() == start.spec()


def test_training_lowers_the_error_and_stores_what_it_trained() -> None:
    w, stats = layer(48, 128)
    blind = Stats(torch.eye(128), stats.absmean, 1)  # codes that know nothing of the inputs
    start = Mixed(outliers=0.004, refine=0).fit(w, blind)
    module = STEMixed(start, w)
    optimizer = torch.optim.Adam(module.parameters(), lr=5e-4)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=200)
    for _ in range(200):
        change = module() - w
        loss = ((change @ stats.hessian) * change).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in module.parameters())
        optimizer.step()
        decay.step()
    after = module.export()
    torch.testing.assert_close(after.dequantize(), module().detach(), rtol=1e-3, atol=1e-4)  # outliers as f16
    assert stats.output_error(w - after.dequantize()) < stats.output_error(w - start.dequantize())
    assert torch.equal(after.four, start.four)
    assert bits_per_weight(after) == bits_per_weight(start)


# Training ----------------------------------------------------------------------------------------------------------


def test_block_training_keeps_the_choices_and_lowers_the_error(tiny_model: Path, tmp_path: Path) -> None:
    """tune=short: the same groups at 4 bits and the same outliers, and a model that is better on the text.

    Random groups and much damping leave something to train: a good fit of a random model is at its optimum.
    """
    words = "a few words that come again and again " * 60
    text = CalibrationData(text=words, rows=8, length=48)
    scheme = "mixed:group=16,four=0.05,outliers=0.002,refine=0,damp=1.0,rank=random,seed=3"
    made = {}
    for name, more in (("fitted", ""), ("trained", ",tune=short,steps=40")):
        quantize(tiny_model, tmp_path / name, scheme + more, text=text, device="cpu")
        made[name] = Checkpoint(tmp_path / name)
    module = next(m for m in made["fitted"].specs if "layers.2" in m and "down" in m)
    before, after = made["fitted"].matrix(module), made["trained"].matrix(module)
    assert isinstance(before, MixedTensor)
    assert isinstance(after, MixedTensor)
    assert (before.group_bits.sum(), before.outliers) == (after.group_bits.sum(), after.outliers)
    ids = torch.tensor(LLM.load(tiny_model, device="cpu").tokenizer.encode(words)[:90])[None]

    def logits(path: Path) -> Tensor:
        model = LLM.load(path, device="cpu").model
        return model(ids, model.new_cache(1))

    full, *others = (logits(p) for p in (tiny_model, *(c.path for c in made.values())))
    fitted, trained = ((y - full).square().mean() for y in others)
    assert trained < 0.9 * fitted


def test_settings_of_training_are_part_of_the_scheme() -> None:
    assert str(parse("mixed:group=16,tune=short,steps=8")) == "mixed:group=16,tune=short,steps=8"
    with pytest.raises(SchemeError, match="steps"):
        parse("mixed:steps=-1")


def test_the_estimate_for_a_search_is_the_fit_without_refinement() -> None:
    w, stats = layer(48, 192)
    config = Mixed(four=0.2, outliers=0.003, refine=0)
    target, _, by = config.wanted(w, stats)
    rows = torch.arange(16, 48)  # whole blocks of outputs, which share scales
    guessed = target[rows] - config.row_errors(target, rows, by)
    wanted = config.fit(w, stats).dequantize(torch.float32)[rows]
    torch.testing.assert_close(guessed, wanted, rtol=2e-3, atol=1e-4)


def test_auto_takes_mixed_matrices_where_they_lose_less(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_attention_heads": 4}
    model = write_tiny_model(tmp_path / "m", num_hidden_layers=2, **sizes)
    text = CalibrationData(text="The cat sat on the mat, and then it went home. " * 30, rows=6, length=32)
    report = quantize(model, tmp_path / "q", "auto:bits=2.8,tune=none", text=text, device="cpu")
    assert report.bits_per_weight <= 2.8
    formats = [spec["format"] for spec in Checkpoint(tmp_path / "q").specs.values()]
    assert "mixed" in formats
    assert LLM.load(tmp_path / "q", device="cpu").generate("a", Sampling(max_tokens=3)).tokens

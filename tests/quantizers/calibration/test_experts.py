"""Calibration, search and training of mixtures of experts, where some experts see few tokens or none."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import write_tokenizer
from mixtral import MIXTRAL, write_mixtral

from crelle.engine.tokenization.tokenizer import Tokenizer
from crelle.formats.storage.checkpoint import Checkpoint
from crelle.formats.storage.open import open_weights
from crelle.models.calibration_model import CalibrationModel
from crelle.models.families import families
from crelle.quantize_job.data import CalibrationData, rows_of
from crelle.quantize_job.run import quantize
from crelle.quantizers.base import BitConfig
from crelle.quantizers.calibration.calibrate import Calibrator
from crelle.quantizers.calibration.expert_coverage import choose_sequences, count_tokens
from crelle.quantizers.calibration.experts_without_tokens import together, warnings_about
from crelle.quantizers.calibration.half_stats import HalfStatsCollector
from crelle.quantizers.calibration.memory_plan import CalibrationMemory
from crelle.quantizers.calibration.stats import Stats, StatsCollector
from crelle.quantizers.schemes.gptq import GPTQ
from crelle.quantizers.schemes.rtn import RTN
from crelle.quantizers.search.sensitivity import sensitivities

EXPERTS = "model.layers.0.block_sparse_moe.experts."
NEVER = 1  # the expert that no token of layer 0 is routed to
RARE = 2  # the one that takes the place of each token's second expert in sequences that begin with _LOUD
_LOUD = 230  # what ends the two bytes of È
TEXT = CalibrationData(text="It was a small text to calibrate on, and to train on as well. " * 30, rows=4, length=32)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose first layer has an expert that no token is routed to, and one that only loud tokens are.

    The first input channel is large and positive for all tokens, so that a router's row with a large negative weight
    there is never chosen; the second one is large for loud tokens alone.
    """
    monkeypatch.setitem(families(), "mixtral", MIXTRAL)
    made = write_mixtral(tmp_path / "moe", num_hidden_layers=2)
    write_tokenizer(made)
    file = made / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    table = tensors["model.embed_tokens.weight"]
    table[:, 0], table[:, 1] = 3.0, 0.0
    table[_LOUD, 1] = 30.0
    tensors["model.layers.0.post_attention_layernorm.weight"][:2] = 1.0
    tensors["model.layers.0.self_attn.o_proj.weight"] *= 0.1
    router = tensors["model.layers.0.block_sparse_moe.gate.weight"]
    router[:, :2] = 0.0
    router[NEVER, 0] = -100.0
    router[RARE, 0], router[RARE, 1] = -100.0, 100.0
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return made


def rows(loud: tuple[int, ...] = ()) -> torch.Tensor:
    """Six sequences, some of them of loud tokens."""
    found = torch.randint(0, 200, (6, 16), generator=torch.Generator().manual_seed(0))
    found[list(loud), ::2] = _LOUD
    return found


def tokens_of(model: Path, tokens: torch.Tensor, keep: bool = True) -> tuple[dict[str, Stats], list[str]]:
    """Return the stats with which the linears of layer 0 are quantized, in batches of two sequences."""
    memory = CalibrationMemory(batch=2, keep=keep)
    layer = Calibrator(CalibrationModel(open_weights(model)), tokens, half=False, memory=memory).begin()
    seen: dict[str, Stats] = {}

    def fit(name: str, weight: torch.Tensor, stats: Stats) -> object:
        seen[name] = stats
        return RTN(bits=4, group=16).fit(weight)

    layer.fit(fit)  # type: ignore[arg-type]
    layer.end()
    return seen, layer.without_tokens


@pytest.mark.parametrize("keep", [True, False])
def test_stats_of_an_expert_are_of_its_tokens(model: Path, keep: bool) -> None:
    """One that sees none in two batches of three, one that never does, and those that see some in all."""
    seen, without = tokens_of(model, rows(loud=(2,)), keep)
    counts = {e: seen[f"{EXPERTS}{e}.w1"].tokens for e in range(5)}
    assert counts[NEVER] == 0
    assert counts[RARE] == 8
    assert sum(counts.values()) == 2 * 6 * 16
    assert without == [f"{EXPERTS}{NEVER}.{slot}" for slot in ("w1", "w3", "w2")]
    for slot in ("w1", "w3", "w2"):
        nothing = seen[f"{EXPERTS}{NEVER}.{slot}"]
        assert torch.equal(nothing.hessian, torch.eye(len(nothing.hessian)))
    assert seen[f"{EXPERTS}{RARE}.w1"] is seen[f"{EXPERTS}{RARE}.w3"]  # one input, one Hessian


def test_stats_of_an_expert_are_the_sums_of_their_definition(model: Path) -> None:
    """Computed here from a pass over all sequences at once: inputs of the experts, weighted token by token."""
    tokens = rows(loud=(2,))
    opened = CalibrationModel(open_weights(model))
    calibrator = Calibrator(opened, tokens, half=False, memory=CalibrationMemory(batch=2))
    layer = calibrator.begin()
    stats = layer.stats(f"{EXPERTS}{RARE}.w2")
    block = opened.block(0)
    inputs: list[torch.Tensor] = []
    linear = block.linears()[f"{EXPERTS}{RARE}.w2"]
    linear.watch = inputs.append
    y = block(opened.embed(tokens))
    weight = y.square().mean(-1).reciprocal().flatten()
    assert linear.rows is not None
    x = inputs[0] * (weight / weight.mean()).sqrt()[linear.rows, None]
    torch.testing.assert_close(stats.hessian, x.T @ x / len(x))
    torch.testing.assert_close(stats.cross, stats.hessian)  # nothing is quantized yet


def test_tokens_that_the_full_precision_model_routes_elsewhere_are_taken_as_they_are(model: Path) -> None:
    """With another router the quantized layer sends other tokens to an expert; the sums still are of those."""
    layer = Calibrator(CalibrationModel(open_weights(model)), rows(), half=False).begin()
    router = layer.block.linears()["model.layers.0.block_sparse_moe.gate"]
    router.weight = router.weight[torch.tensor([NEVER, 0, RARE, 3, 4])]  # expert 0 gets none, NEVER gets 0's
    assert layer.stats(f"{EXPERTS}0.w1").tokens == 0
    moved = layer.stats(f"{EXPERTS}{NEVER}.w1")
    assert moved.tokens > 0
    assert moved.cross is not None
    torch.testing.assert_close(moved.cross, moved.hessian)


@pytest.mark.parametrize("make", [lambda: StatsCollector(4, cross=True), lambda: HalfStatsCollector(4)])
def test_no_tokens_add_nothing(make) -> None:  # type: ignore[no-untyped-def]
    whole, some, none = make(), make(), make()
    x = torch.randn(5, 4)
    for collector in (some, none):
        collector.add(torch.empty(0, 4), torch.empty(0, 4))
    for collector in (some, whole):
        collector.add(x, 1.1 * x)
    assert torch.equal(some.stats().hessian, whole.stats().hessian)
    nothing = none.stats()
    assert (nothing.tokens, nothing.cross, nothing.sample) == (0, None, None)
    assert torch.equal(nothing.hessian, torch.eye(4))


SCHEMES = ("gptq:bits=3,group=16", "auto:bits=3.5,steps=3", "awq:bits=4,group=16", "atom:group=16,outliers=4")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.sample(2)
def test_a_model_with_an_expert_without_tokens_is_quantized(model: Path, tmp_path: Path, scheme: str) -> None:
    """And it is said once for all layers, of which a run that was interrupted wrote the first."""

    def stop(done: int, total: int, note: str) -> None:
        if note == "model.layers.0":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "q", scheme, text=TEXT, device="cpu", progress=stop)
    report = quantize(model, tmp_path / "q", scheme, text=TEXT, device="cpu", resume=True)
    told = [w for w in report.warnings if "saw no token" in w]
    assert len(told) == 1
    assert int(told[0].split()[0]) >= 2  # NEVER and RARE; layer 1 may have others
    if scheme.startswith("gptq"):
        module = f"{EXPERTS}{NEVER}.w1"
        source = open_weights(model).read(f"{module}.weight").float()
        alone = GPTQ(bits=3, group=16).fit(source, StatsCollector(64).stats())
        assert torch.equal(Checkpoint(tmp_path / "q").matrix(module).dequantize(), alone.dequantize())


@pytest.mark.gpu
def test_experts_are_trained_on_a_gpu(model: Path, tmp_path: Path) -> None:
    """More steps than run before others are captured in a CUDA graph: routing cannot be."""
    scheme = "auto:bits=3.5,steps=6,tune=full,end=6,own=2"
    report = quantize(model, tmp_path / "q", scheme, text=TEXT, device="cuda")
    assert len(report.losses) == 6
    assert any("saw no token" in w for w in report.warnings)


def test_training_end_to_end_takes_experts_without_tokens(model: Path, tmp_path: Path) -> None:
    report = quantize(
        model, tmp_path / "q", "auto:bits=4,search=false,steps=2,tune=full,end=3,own=2", text=TEXT, device="cpu"
    )
    assert len(report.losses) == 3


def test_an_expert_without_tokens_counts_as_an_average_one_in_the_search(model: Path) -> None:
    settings = (BitConfig(2, 16), BitConfig(4, 16))
    found = sensitivities(CalibrationModel(open_weights(model)), rows(loud=(2,)), settings, half=False)
    by_name = {one.module: one for one in found}
    assert len(by_name) == len(found) == 2 * (5 + 5 * 3)
    others = [by_name[f"{EXPERTS}{e}.w2"] for e in range(5) if e != NEVER]
    for s in settings:
        mean = sum(one.losses[s] for one in others) / len(others)
        assert by_name[f"{EXPERTS}{NEVER}.w2"].losses[s] == pytest.approx(mean)
    rare = by_name[f"{EXPERTS}{RARE}.w2"].losses[settings[0]]
    assert 0 < rare < max(one.losses[settings[0]] for one in others)  # eight tokens of 96


def test_warnings_of_layers_become_one() -> None:
    one = warnings_about(["layers.0.mlp.experts.0.w1", "layers.0.mlp.experts.0.w2"])
    two = warnings_about(["layers.10.experts.5.w1", "layers.10.experts.7.w1"])
    assert one[0].startswith("1 expert saw no token")
    assert "(layers.0: 0)" in one[0]
    whole = two[0].replace("2 experts", "3 experts").replace("(layers", "(layers.0: 0; layers")
    assert "(layers.0: 0; layers.10: 5, 7)" in whole
    assert together([*one, "something else", *two]) == ("something else", whole)
    assert together(one) == tuple(one)
    many = [w for i in range(12) for w in warnings_about([f"layers.{i}.experts.1.w1"])]
    assert "layers.7: 1; and in 4 more layers)" in together(many)[0]
    assert warnings_about([]) == []
    assert together(["something else"]) == ("something else",)


def test_tokens_of_experts_are_counted_by_sequence(model: Path) -> None:
    """As the calibration itself counts them: layer 0 reads what the full-precision model does."""
    tokens = rows(loud=(2, 5))
    counts = count_tokens(CalibrationModel(open_weights(model)), tokens, device=torch.device("cpu"), batch=4)
    assert counts.shape == (2 * 5, 6)
    assert counts[:5].sum(0).tolist() == counts[5:].sum(0).tolist() == [2 * 16] * 6
    assert counts[NEVER].tolist() == [0] * 6
    assert counts[RARE].tolist() == [0, 0, 8, 0, 0, 8]
    layer = Calibrator(CalibrationModel(open_weights(model)), tokens, memory=CalibrationMemory(batch=4)).begin()
    assert [layer.stats(f"{EXPERTS}{e}.w1").tokens for e in range(5)] == counts[:5].sum(1).tolist()


def test_sequences_are_chosen_that_bring_tokens_to_experts_without() -> None:
    have, more = torch.tensor([50, 3, 0]), torch.tensor([[9, 9, 9, 9], [0, 20, 4, 0], [0, 0, 30, 2]])
    assert choose_sequences(have, more, limit=4, enough=32) == [2, 1, 3]  # 34, 20 and 2 tokens; the first brings none
    assert choose_sequences(have, more, limit=1, enough=32) == [2]
    assert choose_sequences(have, more, limit=4, enough=0) == []


def test_text_is_added_for_experts_that_it_missed(model: Path, tmp_path: Path) -> None:
    """The rare expert's token stands in the text, but in none of the sequences that were chosen first."""
    tokenizer = Tokenizer.of(open_weights(model))
    quiet = "It was a quiet text. " * 60
    written = quiet[:200] + 24 * "È" + quiet[:200]

    def loud(seed: int, more: bool) -> bool:
        return bool((rows_of(tokenizer, written, 32, 7, seed, more=more) == _LOUD).any())

    seed = next(s for s in range(100) if not loud(s, more=False) and loud(s, more=True))
    text = CalibrationData(text=written, rows=7, length=32, seed=seed)
    report = quantize(model, tmp_path / "q", "gptq:bits=3,group=16", text=text, device="cpu")
    assert report.experts is not None
    assert 0 < report.experts.added <= 3
    told = " ".join(w for w in report.warnings if "saw no token" in w)
    assert f"model.layers.0: {NEVER})" in told or f"model.layers.0: {NEVER};" in told

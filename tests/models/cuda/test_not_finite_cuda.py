"""A token whose embedding is broken, through whole steps on a GPU: its logits are NaN, other sequences never notice."""

import pytest
import torch
from cuda_models import LLAMA, OPT, WIDE
from test_cuda_executor import Sequences, random_ids

from crelle.bench.model_shapes import RandomWeights
from crelle.formats.base import QuantTensor
from crelle.kernels import cuda
from crelle.models.loader import Model, build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))]
CONFIGS = {"llama": LLAMA, "wide": WIDE, "opt": {**OPT, "tie_word_embeddings": False}}
SCHEMES = ["bcq:bits=3,group=128", "rtn:bits=4,group=64", "mixed:four=0.25,outliers=0.002", "fp16"]
SCHEMES += ["atom:w=4,a=4,group=128,outliers=128", "atom:w=4,a=8,levels=2,group=128,outliers=128"]
# what `key_centers` runs over: the model must load with a coded cache
SAMPLE = torch.randint(1000, (256,), generator=torch.Generator().manual_seed(0)).tolist()
BROKEN = min(set(range(100, 1000)) - set(SAMPLE))  # the token


class BrokenToken(RandomWeights):
    """Random weights with one NaN in the embedding."""

    def matrix(self, module: str) -> QuantTensor:
        w = super().matrix(module)
        if module.endswith("embed_tokens"):
            w.tensors()["weight"][BROKEN, 5] = float("nan")
        return w


def broken(name: str, scheme: str) -> Model:
    where = torch.device("cuda")
    return build(BrokenToken(CONFIGS[name], scheme, where, seed=3), where)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_of_few_sequences(name: str, scheme: str) -> None:
    model = broken(name, scheme)
    good, bad = Sequences(model, "kv16", 3, 64), Sequences(model, "kv16", 3, 64)
    for sequences in (good, bad):
        sequences.run({b: random_ids(10, seed=b) for b in range(3)})
    clean, found = good.run({0: [7], 1: [8], 2: [9]}), bad.run({0: [7], 1: [BROKEN], 2: [9]})
    assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    assert bool(bad.run({0: [7], 1: [8], 2: [9]})[1].isnan().all())  # it stays in the cache


@pytest.mark.parametrize("kv", ["kv16", "kv8", "kv4"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch(name: str, scheme: str, kv: str) -> None:
    model = broken(name, scheme)
    good, bad = Sequences(model, kv, 6, 64), Sequences(model, kv, 6, 64)
    ids = {b: [i if i != BROKEN else 0 for i in random_ids(20 + b, seed=b)] for b in range(6)}
    spoilt = ids | {2: [*ids[2][:3], BROKEN, *ids[2][4:]]}  # early in its prompt: only keys and values carry it on
    others = [b for b in range(6) if b != 2]
    wanted, found = good.run(ids), bad.run(spoilt)
    assert bool(found[2].isnan().all())
    assert torch.equal(found[others], wanted[others])
    for _ in range(2):
        wanted, found = good.run({b: [7 + b] for b in range(6)}), bad.run({b: [7 + b] for b in range(6)})
        assert bool(found[2].isnan().all())
        assert torch.equal(found[others], wanted[others])
    told = bad.batch.sample(found).tokens()
    assert told[2] < 0
    assert [told[b] for b in others] == found[others].argmax(-1).tolist()

"""Log-likelihoods on a GPU: padded batches score as single sequences do."""

import pytest
import torch

from crelle.bench.load.model_sources import random_llm
from crelle.eval.tasks.loglikelihood import Ending, loglikelihoods
from crelle.formats.kv.pages import KVFormat
from crelle.kernels import cuda

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(cuda.available()), reason=str(cuda.available()))]


@pytest.mark.parametrize("kv", [16, 4])
@pytest.mark.parametrize("scheme", ["rtn:bits=4,group=64", "fp16"])
def test_padded_batches_score_as_single_sequences(scheme: str, kv: int) -> None:
    llm = random_llm("smollm2-135m", scheme, torch.device("cuda"), layers=3)
    llm.kv = KVFormat.parse(kv)
    torch.manual_seed(5)
    sizes = [2, 3, *(int(n) for n in torch.randint(4, 90, (30,)))]
    endings = [Ending(tuple(torch.randint(49152, (n,)).tolist()), 1 + n // 3) for n in sizes]
    together = loglikelihoods(llm, endings)
    alone = [loglikelihoods(llm, [ending])[0] for ending in endings]
    assert [s.loglikelihood for s in together] == pytest.approx([s.loglikelihood for s in alone], rel=5e-3)

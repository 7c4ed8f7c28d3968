"""Products and attention of no rows return no rows and launch nothing; whoever launches an empty grid is told so."""

import pytest
import torch
from recorded_gpu import pretend

from crelle.errors import CrelleError
from crelle.formats.kv.pages import KVFormat, KVPages
from crelle.kernels.cuda import launch
from crelle.kernels.cuda.attention import paged_attention
from crelle.kernels.cuda.dense import dense
from crelle.kernels.cuda.step import embed_argmax

HALF = torch.float16
NONE = torch.empty(0, dtype=torch.int32)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


@pytest.mark.parametrize("kv", ["16", "4", "k4v2"])
def test_attention_of_no_tokens_launches_nothing(kv: str) -> None:
    pages = KVPages.new(KVFormat.parse(kv), 4, 2, 64, HALF, "cpu")
    table, q = torch.zeros(0, 4, dtype=torch.int32), torch.empty(0, 8, 64, dtype=HALF)
    with launch.recording() as kernels:
        assert paged_attention.attend(q, pages, table, NONE).shape == (0, 8, 64)
        assert paged_attention.read(pages, table, torch.zeros(1, dtype=torch.int32), 0).shape == (2, 0, 2, 64)
        stored = paged_attention.append(q[:, :2], q[:, :2], pages, table, NONE, q=q)
        assert stored is not None
        assert stored.shape == (0, 8, 64)
    assert not kernels


def test_dense_products_of_no_rows_launch_nothing() -> None:
    x, w = torch.empty(0, 256, dtype=HALF), torch.empty(80, 256, dtype=HALF)
    with launch.recording() as kernels:
        assert dense.product(x, w).shape == (0, 80)
        assert dense.apply(x, "RMS_NORM", w[0], eps=1e-5).shape == (0, 256)
    assert not kernels


def test_nothing_is_embedded_or_sampled_for_no_rows() -> None:
    with launch.recording() as kernels:
        assert embed_argmax.Argmax(4, torch.device("cpu"))(torch.empty(0, 77)).shape == (0,)
        assert embed_argmax.embed(torch.empty(0, dtype=torch.int64), torch.empty(77, 20).half()).shape == (0, 20)
    assert not kernels


def test_an_empty_grid_is_refused_with_the_name_of_the_kernel() -> None:
    with launch.recording(), pytest.raises(CrelleError, match=r"greedy<float>.*\(32, 0, 1\)"):
        launch.load(*embed_argmax.greedy_variant(torch.float32))((32, 0, 1), 256)

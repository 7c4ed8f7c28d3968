"""BERT against transformers: hidden states of padded batches, quantized and reloaded; what an encoder refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import run, succeed
from random_models import write_random
from transformers import AutoModel, BertConfig, BertForMaskedLM
from wordpiece import WORDS, write_wordpiece

from crelle import CalibrationData, Embedder, quantize
from crelle.errors import FormatError, SchemeError, UnsupportedError
from crelle.formats.storage.open import open_weights
from crelle.models.calibration_model import CalibrationModel
from crelle.models.loader import build, build_encoder, read_spec

CPU = torch.device("cpu")
TEXTS = ["the cat sleeps .", "dog", "a dog runs on the mat . the cat sleeps on a mat .", "cat runs"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wordpiece(write_random(tmp_path_factory.mktemp("bert") / "m", "Bert"))


def padded(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids whose padding is not 0 but noise, which nothing may see, and the mask."""
    ids = torch.randint(4, 320, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    return ids, (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def theirs(path: Path, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = AutoModel.from_pretrained(path, dtype=torch.float32)(ids, mask).last_hidden_state
    return found


@pytest.mark.parametrize("lengths", [[40], [7, 7, 7], [1, 33, 12, 128]])
def test_states_equal_transformers(bert: Path, lengths: list[int]) -> None:
    ids, mask = padded(lengths)
    model = build_encoder(open_weights(bert), CPU)
    found = model(ids, torch.tensor(lengths))
    seen = mask.bool()
    torch.testing.assert_close(found[seen], theirs(bert, ids, mask)[seen], rtol=1e-4, atol=1e-4)


def test_calibration_looks_in_both_directions(bert: Path) -> None:
    ids, mask = padded([24, 24])
    model = CalibrationModel(open_weights(bert))
    x = model.embed(ids)
    for i in range(model.layers):
        x = model.block(i)(x)
    torch.testing.assert_close(model.finish(x), theirs(bert, ids, mask), rtol=1e-4, atol=1e-4)


def test_a_model_with_a_head_has_other_names(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=320, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96
    )
    BertForMaskedLM(config).save_pretrained(tmp_path)
    ids, mask = padded([9])
    torch.testing.assert_close(
        build_encoder(open_weights(tmp_path), CPU)(ids), theirs(tmp_path, ids, mask), rtol=1e-4, atol=1e-4
    )


SCHEMES = {
    "rtn:bits=4,group=32": {"head": "rtn:bits=8,group=32"},
    "bcq:bits=3,group=32,rounds=2": {},
    "mixed:group=16,four=0.25,outliers=0.002": {},
    "gptq:bits=3,group=32": {},
    "atom:w=4,a=8,group=32,outliers=32": {},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_embeds_as_transformers_does(bert: Path, tmp_path: Path, scheme: str) -> None:
    """The same checkpoint in both: calibrated over padded and unpadded layers alike."""
    text = CalibrationData(text=" ".join(TEXTS * 40), rows=8, length=16, own=0)
    made = quantize(bert, tmp_path / "q", scheme, text=text, **SCHEMES[scheme]).out
    embedder = Embedder.load(made)
    assert embedder.bits_per_weight is not None
    assert 2.5 < embedder.bits_per_weight < 8
    found = embedder.embed(TEXTS)
    ids = [embedder.encode(t) for t in TEXTS]
    batch = torch.tensor([row + [0] * (max(map(len, ids)) - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (batch.shape[1] - len(row)) for row in ids])
    states = theirs(made, batch, mask)
    expected = torch.nn.functional.normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    full = Embedder.load(bert).embed(TEXTS)
    assert float((found * full).sum(-1).min()) > 0.9


def test_a_text_has_one_embedding_in_any_batch(bert: Path) -> None:
    embedder = Embedder.load(bert)
    together = embedder.embed(TEXTS)
    for i, text in enumerate(TEXTS):
        torch.testing.assert_close(embedder.embed([text])[0], together[i], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(embedder.embed(TEXTS, batch=1), together, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(4))


def test_texts_get_their_special_tokens_and_are_cut_between_them(bert: Path) -> None:
    embedder = Embedder.load(bert)
    assert embedder.encode("cat runs") == [2, 4 + WORDS.index("cat"), 4 + WORDS.index("runs"), 3]
    assert embedder.encode("cat runs cat", max_tokens=3) == [2, 4 + WORDS.index("cat"), 3]
    assert len(embedder.encode("cat " * 500)) == 128
    assert embedder.embed(["cat", "cat " * 500]).isfinite().all()


def test_pooling_and_length(bert: Path) -> None:
    embedder = Embedder.load(bert)
    ids = torch.tensor([embedder.encode(TEXTS[0])])
    states = theirs(bert, ids, torch.ones_like(ids))[0]
    torch.testing.assert_close(
        embedder.embed(TEXTS[:1], pooling="cls", normalize=False)[0], states[0], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(embedder.embed(TEXTS[:1], normalize=False)[0], states.mean(0), rtol=1e-4, atol=1e-4)
    assert embedder.embed([]).shape == (0, 128)


def test_command_line(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("\n".join(TEXTS[1:]) + "\n\n")
    found = succeed("embed", bert, TEXTS[0], "--file", tmp_path / "texts", "--json").json
    assert found["dimensions"] == 128
    assert found["tokens"] == [6, 3, 16, 4]
    torch.testing.assert_close(torch.tensor(found["embeddings"]), Embedder.load(bert).embed(TEXTS))
    shown = succeed("embed", bert, *TEXTS).out
    assert "4 embeddings of 128 dimensions" in shown
    assert shown.count("1.00") >= 4
    assert "embeddings: torch, layer by layer" in succeed("explain", bert).out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("generate", "BERT", "--prompt", "x"), "is an encoder and generates no text; use `crelle embed`"),
        (("embed", "BERT"), "there is no text to embed"),
        (("embed", "BERT", "x", "--batch", 0), "a batch has at least 1 text"),
        (("quantize", "BERT", "OUT"), "needs the predictions of a decoder, and this is an encoder"),
        (("quantize", "BERT", "OUT", "--scheme", "mixed:tune=full"), "needs the predictions of a decoder"),
    ],
)
def test_refusals_are_a_sentence(bert: Path, tmp_path: Path, args: tuple[Any, ...], says: str) -> None:
    names = {"BERT": bert, "OUT": tmp_path / "out"}
    found = run(*(names.get(a, a) for a in args))
    assert found.code != 0
    assert says in found.err.replace("\n", " ")
    assert "Traceback" not in found.err
    assert not (tmp_path / "out").exists()


def test_decoders_and_odd_configs_are_refused(bert: Path, tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(UnsupportedError, match="is a decoder; embeddings need an encoder"):
        Embedder.load(tiny_model)
    with pytest.raises(UnsupportedError, match="use `crelle embed`"):
        build(open_weights(bert), CPU)
    with pytest.raises(SchemeError, match="should be a list of texts"):
        Embedder.load(bert).embed("one text")
    config = json.loads((bert / "config.json").read_text())
    for change, kind, says in (
        ({"position_embedding_type": "relative_key"}, UnsupportedError, "only with absolute ones"),
        ({"is_decoder": True}, UnsupportedError, "as a decoder"),
        ({"hidden_act": "mish"}, UnsupportedError, "is not one of BERT's"),
        ({"num_attention_heads": 5}, FormatError, "which 'num_attention_heads' = 5 does not divide"),
    ):
        weights = open_weights(bert)
        weights.config = config | change  # type: ignore[misc]
        with pytest.raises(kind, match=says):
            read_spec(weights)

"""gpt-oss as it is published, on a GPU: a directory of MXFP4 experts, and a checkpoint of it, in CUDA graphs."""

from pathlib import Path

import pytest
import torch
from gpt_oss import write_gpt_oss
from test_cuda_executor import Sequences
from test_cuda_mixtures import check_rows

from crelle import LLM, Sampling, quantize
from crelle.formats.kv.pages import KVFormat
from crelle.kernels.cuda.executor import supports_model
from crelle.models.loader import load


@pytest.mark.gpu
def test_a_published_directory_and_a_checkpoint_of_it_run_in_graphs(tmp_path: Path) -> None:
    """Logits of prompts and steps are those of the layers in f32; both generate the same tokens."""
    sizes = {"hidden_size": 192, "intermediate_size": 160, "head_dim": 64, "num_local_experts": 8}
    source = write_gpt_oss(tmp_path / "published", **sizes)
    made = quantize(source, tmp_path / "kept", "keep", device="cuda").out
    ids = {b: torch.randint(250, (60,), generator=torch.Generator().manual_seed(b)).tolist() for b in range(12)}
    plain, _ = load(source, device="cpu")
    with torch.inference_mode():
        wanted = {b: plain(torch.tensor([i]), plain.new_cache(1))[0].cuda() for b, i in ids.items()}
    generated = []
    for path in (source, made):
        llm = LLM.load(path, device="cuda")
        assert llm.model.dtype == torch.bfloat16
        assert supports_model(llm.model, KVFormat.parse("kv16")) is None
        sequences = Sequences(llm.model, "kv16", 12, 64)
        found = list(sequences.run({b: i[:30] for b, i in ids.items()}))
        expected = [wanted[b][29] for b in ids]
        for rows in (range(1), range(3), range(12)):
            for _ in range(3):
                found += sequences.run({b: [ids[b][sequences.lengths[b]]] for b in rows})
                expected += [wanted[b][sequences.lengths[b] - 1] for b in rows]
        check_rows(found, expected, torch.bfloat16)
        assert sequences.untouched()
        generated.append([c.tokens for c in llm.generate(["one", "and two"], Sampling(max_tokens=24))])
    assert generated[0] == generated[1]

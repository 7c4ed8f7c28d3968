"""GPT-2 and Gemma 3 from GGUF: names, layout and config as Hugging Face has them, or said to differ."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf_models import GEMMA3, GPT2, converted, random_tensors, write_gguf

from crelle.errors import CrelleError, FormatError, UnsupportedError
from crelle.formats.exporters.directory import export_directory
from crelle.formats.exporters.gptq import GPTQLayout
from crelle.formats.importers.gguf_architectures import ARCHITECTURES
from crelle.formats.importers.gptq import GPTQDirectory
from crelle.formats.storage.hf_layout import is_conv1d
from crelle.formats.storage.open import open_weights

BY_TYPE = {"gpt2": GPT2, "gemma3": GEMMA3}
FULL_ROPE = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize("kind", [Type.F32, Type.BF16, Type.Q8_0, Type.Q4_1], ids=lambda k: k.name)
@pytest.mark.parametrize("arch", BY_TYPE)
def test_tensors_have_the_names_and_values_of_the_original(tmp_path: Path, arch: str, kind: Type) -> None:
    config = BY_TYPE[arch]
    tensors = random_tensors(config)
    file = write_gguf(tmp_path / "m.gguf", config, tensors, kind=kind)
    plain, encoded = open_weights(file), open_weights(file, encoded=True)
    assert sorted(plain.names()) == sorted(tensors)
    for name, original in tensors.items():
        want = converted(config, name, original)
        if want.ndim == 2:
            want = gguf.quants.dequantize(gguf.quants.quantize(want, kind), kind)
            module = name.removesuffix(".weight")
            assert torch.equal(encoded.matrix(module).dequantize(), torch.from_numpy(want)), name
        assert plain.shape(name) == want.shape
        assert np.array_equal(plain.read(name).float().numpy(), want), name
        assert plain.transposed(name) == (want.shape != original.shape or is_conv1d(config, name))


def test_gpt2s_matrices_are_told_to_be_transposed(tmp_path: Path) -> None:
    weights = open_weights(write_gguf(tmp_path / "m.gguf", GPT2))
    told = {n.split(".", 3)[-1] for n in weights.names() if weights.transposed(n)}
    assert told == {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"}
    assert weights.shape("transformer.h.1.attn.c_attn.weight") == (3 * 64, 64)  # [outputs, inputs], q k v joined


def test_gpt2s_config(tmp_path: Path) -> None:
    weights = open_weights(write_gguf(tmp_path / "m.gguf", GPT2))
    tokens = {"bos_token_id": 256, "eos_token_id": 258}
    assert weights.config == {"architectures": ["GPT2LMHeadModel"], **GPT2, **tokens}


def test_gpt2s_head_may_be_stored(tmp_path: Path) -> None:
    tensors = random_tensors(GPT2)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] * 2
    weights = open_weights(write_gguf(tmp_path / "m.gguf", GPT2, tensors))
    assert weights.config["tie_word_embeddings"] is False
    assert np.array_equal(weights.read("lm_head.weight").numpy(), tensors["lm_head.weight"])


def test_gemma3s_config(tmp_path: Path) -> None:
    weights = open_weights(write_gguf(tmp_path / "m.gguf", GEMMA3))
    assert weights.config == {
        "architectures": ["Gemma3ForCausalLM"],
        **GEMMA3,
        "attention_bias": False,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": FULL_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "norm_weight_offset": 0,
        "bos_token_id": 256,
        "eos_token_id": 258,
    }


@pytest.mark.parametrize("arch", BY_TYPE)
def test_transformers_understands_the_config(tmp_path: Path, arch: str) -> None:
    from transformers import AutoConfig

    config = open_weights(write_gguf(tmp_path / "m.gguf", BY_TYPE[arch])).config
    got, want = AutoConfig.for_model(**config), AutoConfig.for_model(**BY_TYPE[arch])
    said = {k: v for k, v in want.to_dict().items() if not k.endswith(("token_id", "architectures"))}
    assert {k: got.to_dict()[k] for k in said} == said


@pytest.mark.parametrize("arch", BY_TYPE)
def test_tensors_are_those_that_transformers_reads(tmp_path: Path, arch: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = write_gguf(tmp_path / "m.gguf", BY_TYPE[arch], kind=Type.Q8_0)
    weights = open_weights(file)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**weights.config))
    want = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    assert sorted(weights.names()) == sorted(want)
    for name, theirs in want.items():
        ours = weights.read(name).T if weights.transposed(name) else weights.read(name)
        if name.endswith("norm.weight"):
            ours = ours - (1 - weights.config.get("norm_weight_offset", 1))
        assert torch.equal(ours.float(), theirs.float()), name


def adding(**values: Any) -> Any:
    """Return a change of a GGUF file: more metadata of the architecture gemma3."""

    def add(writer: GGUFWriter) -> None:
        for key, value in values.items():
            key = f"gemma3.{key.replace('__', '.')}"
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_uint32(key, value)

    return add


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        (2, [SLIDING, FULL] * 3 + [SLIDING]),
        (1, [FULL] * 7),
        (0, [SLIDING] * 7),
        ([True, True, False, True, True, False, False], [SLIDING, SLIDING, FULL] * 2 + [FULL]),
    ],
    ids=str,
)
def test_gemma3s_windows_may_have_another_pattern(tmp_path: Path, pattern: Any, kinds: list[str]) -> None:
    change = adding(attention__sliding_window_pattern=pattern)
    assert open_weights(write_gguf(tmp_path / "m.gguf", GEMMA3, change=change)).config["layer_types"] == kinds


@pytest.mark.parametrize("pattern", [[True, False], "odd", 0.5], ids=str)
def test_a_senseless_pattern_is_refused(tmp_path: Path, pattern: Any) -> None:
    file = write_gguf(tmp_path / "m.gguf", GEMMA3, change=adding(attention__sliding_window_pattern=pattern))
    with pytest.raises(FormatError, match=r"'gemma3\.attention\.sliding_window_pattern' should be a period"):
        open_weights(file)


def test_gemma3_without_windows_is_full_attention(tmp_path: Path) -> None:
    config = open_weights(write_gguf(tmp_path / "m.gguf", GEMMA3, without=("sliding_window",), change=None)).config
    assert config["layer_types"] == [FULL] * 7
    assert config["sliding_window"] is None


def test_gemma3s_rope_scaling_is_that_of_full_attention(tmp_path: Path) -> None:
    change = adding(rope__scaling__type="linear", rope__scaling__factor=8.0, rope__freq_base_swa=20000.0)
    rope = open_weights(write_gguf(tmp_path / "m.gguf", GEMMA3, change=change)).config["rope_parameters"]
    assert rope["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 20000.0}


def test_a_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    rope = open_weights(write_gguf(tmp_path / "m.gguf", GEMMA3, change=adding(rope__scaling__factor=8.0))).config
    assert rope["rope_parameters"]["full_attention"]["rope_type"] == "linear"


def test_the_largest_gemma3_scales_its_scores_by_width(tmp_path: Path) -> None:
    config = {**GEMMA3, "num_hidden_layers": 62, "head_dim": 8, "hidden_size": 128, "intermediate_size": 8}
    assert open_weights(write_gguf(tmp_path / "m.gguf", config)).config["query_pre_attn_scalar"] == 128 // 4
    config["num_hidden_layers"] = 48
    assert open_weights(write_gguf(tmp_path / "n.gguf", config)).config["query_pre_attn_scalar"] == 8


def test_a_soft_cap_of_the_logits_is_read(tmp_path: Path) -> None:
    config = open_weights(write_gguf(tmp_path / "m.gguf", GEMMA3, change=adding(final_logit_softcapping=30.0))).config
    assert config["final_logit_softcapping"] == 30.0


def test_more_layers_than_tensors_are_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", GEMMA3, without=("block_count",), change=adding(block_count=0xFFFFFFFF))
    with pytest.raises(FormatError, match="claims 4294967295 layers, but has only"):
        open_weights(file)


@pytest.mark.parametrize("arch", BY_TYPE)
def test_metadata_of_any_type_is_refused_with_a_sentence(tmp_path: Path, arch: str) -> None:
    for key in ("embedding_length", "block_count", "head_count"):
        gguf_key = f"{arch}.{'attention.' if key == 'head_count' else ''}{key}"
        file = write_gguf(
            tmp_path / f"{key}.gguf",
            BY_TYPE[arch],
            without=(key,),
            change=lambda w, k=gguf_key: w.add_string(k, "many"),  # type: ignore[misc]
        )
        try:
            assert open_weights(file).config  # the family's config is checked by the loader
        except CrelleError as e:
            assert str(file) in str(e)  # noqa: PT017


def test_every_name_is_one_that_gguf_knows() -> None:
    """The table names what the gguf package lists for the architecture, and nothing is missing but rope tables."""
    by_name = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}
    for name, arch in ARCHITECTURES.items():
        known = {gguf.TENSOR_NAMES[t].replace("blk.{bid}.", "") for t in gguf.MODEL_TENSORS[by_name[name]]}
        left = known - set(arch.outer) - set(arch.inner)
        assert not {n for n in left if not n.startswith(("rope_freqs", "attn_rot_embd", "ffn_gate_inp", "ffn_"))}, name


def test_scales_beside_a_matrix_are_not_left_out_quietly() -> None:
    with pytest.raises(UnsupportedError, match=r"'blk\.0\.attn_q\.scale' does not belong to a 'llama' model"):
        ARCHITECTURES["llama"].hf_name("blk.0.attn_q.scale")


# Out again, as Hugging Face has them


@pytest.mark.parametrize("arch", BY_TYPE)
def test_an_exported_model_has_hugging_faces_layout(tmp_path: Path, arch: str) -> None:
    config, plain = BY_TYPE[arch], ("wte.weight", "wpe.weight", "embed_tokens.weight", "0.mlp.c_fc.weight")
    tensors = random_tensors(config)
    file = write_gguf(tmp_path / "m.gguf", config, tensors, kind=Type.Q4_0, plain=plain)
    weights = open_weights(file, encoded=True)
    export_directory(weights, tmp_path / "out", GPTQLayout())
    made = open_weights(tmp_path / "out")
    assert isinstance(made, GPTQDirectory)
    assert "norm_weight_offset" not in made.config
    for name, want in tensors.items():
        got = made.read(name).numpy()
        if name.removesuffix(".weight") in made.encoded:
            assert np.array_equal(got, weights.read(name).numpy())
            assert made.transposed(name) == is_conv1d(config, name)
        else:
            assert np.allclose(got, want, rtol=0, atol=2**-22), name
            assert not made.transposed(name)

"""GGUF files under the Hugging Face interface: names, layout, numbers and config as the original model had them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_gguf as tiny
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from crelle.errors import CrelleError, FormatError, UnsupportedError
from crelle.formats.dense import DenseTensor
from crelle.formats.importers.gguf import GGUFFile
from crelle.formats.storage.open import open_weights
from crelle.models.rope import rope_of

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DTYPES = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
QUANTIZED = [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]


def as_stored(w: tiny.Array, kind: Type) -> tiny.Array:
    """What the numbers of a matrix are after they went through a storage type."""
    return gguf.quants.dequantize(gguf.quants.quantize(w, kind), kind)


@pytest.mark.parametrize("kind", [*DTYPES, *QUANTIZED], ids=lambda k: k.name)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tensors_come_back_as_the_original_had_them(tmp_path: Path, arch: str, kind: Type) -> None:
    tensors = tiny.tiny_tensors(arch)
    weights = open_weights(tiny.write_tiny_gguf(tmp_path / "m.gguf", arch, tensors=tensors, kind=kind))
    assert isinstance(weights, GGUFFile)
    assert sorted(weights.names()) == sorted(tensors)
    for name, w in tensors.items():
        got = weights.read(name)
        assert weights.shape(name) == tuple(got.shape) == w.shape
        assert got.dtype == (DTYPES.get(kind, torch.float32) if w.ndim == 2 else torch.float32)
        want = as_stored(w, kind) if w.ndim == 2 else w
        assert np.array_equal(got.float().numpy(), want), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tensors_are_those_that_transformers_reads(tmp_path: Path, arch: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = tiny.write_tiny_gguf(tmp_path / "m.gguf", arch, kind=Type.Q8_0)
    config = AutoConfig.for_model(**load_gguf_checkpoint(str(file))["config"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    want = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    weights = open_weights(file)
    assert sorted(weights.names()) == sorted(want)
    for name, tensor in want.items():
        assert torch.equal(weights.read(name).float(), tensor.float()), name


def test_the_biases_of_a_llama_are_reordered_with_its_rows(tmp_path: Path) -> None:
    tensors = tiny.tiny_tensors("llama", bias=True)
    weights = open_weights(tiny.write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors))
    assert weights.config["attention_bias"] is True
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{part}.bias"
        assert np.array_equal(weights.read(name).numpy(), tensors[name])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_config_is_that_of_the_original(tmp_path: Path, arch: str, tied: bool) -> None:
    tensors = tiny.tiny_tensors(arch, tied=tied)
    weights = open_weights(tiny.write_tiny_gguf(tmp_path / "m.gguf", arch, tensors=tensors))
    assert weights.config == {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": tiny.WIDTH,
        "intermediate_size": tiny.INNER,
        "num_hidden_layers": tiny.LAYERS,
        "num_attention_heads": tiny.HEADS,
        "num_key_value_heads": tiny.KV_HEADS,
        "head_dim": tiny.HEAD,
        "max_position_embeddings": tiny.CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "vocab_size": tiny.VOCABULARY,
        "tie_word_embeddings": tied,
        "attention_bias": arch == "qwen2",
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": 256,
        "eos_token_id": 258,
    }
    assert ("lm_head.weight" in weights.names()) is not tied


def test_metadata_that_a_file_may_leave_out_has_llama_cpps_defaults(tmp_path: Path) -> None:
    tensors = tiny.tiny_tensors("qwen2", width=tiny.HEADS * tiny.HEAD)
    optional = ("head_count_kv", "key_length", "rope_freq_base")
    file = tiny.write_tiny_gguf(tmp_path / "m.gguf", "qwen2", tensors=tensors, without=optional, change=None)
    config = open_weights(file).config
    assert config["num_key_value_heads"] == tiny.HEADS
    assert config["head_dim"] == tiny.HEAD
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "head_count", "layer_norm_rms_eps"])
def test_metadata_that_a_file_must_have_is_missed_with_a_sentence(tmp_path: Path, key: str) -> None:
    file = tiny.write_tiny_gguf(tmp_path / "m.gguf", without=(key,))
    with pytest.raises(FormatError, match=f"{file} has no metadata 'llama"):
        open_weights(file)


def test_a_matrix_is_dense(tmp_path: Path) -> None:
    weights = open_weights(tiny.write_tiny_gguf(tmp_path / "m.gguf", kind=Type.F16))
    w = weights.matrix("model.layers.0.mlp.down_proj")
    assert isinstance(w, DenseTensor)
    assert w.weight.dtype == torch.float16


# Rope


def llama3_factors(theta: float, head: int, factor: float, original: int) -> tiny.Array:
    """The table of factors that llama.cpp's converter writes (low_freq_factor 1, high_freq_factor 4)."""
    table = []
    for i in range(0, head, 2):
        wavelength = 2 * np.pi * theta ** (i / head)
        if wavelength < original / 4:
            table.append(1.0)
        elif wavelength > original:
            table.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, dtype=np.float32)


@pytest.mark.parametrize(("factor", "head", "original"), [(8.0, 128, 8192), (32.0, 64, 8192), (8.0, 32, 4096)])
def test_llama3_rope_is_recovered_from_its_factors(tmp_path: Path, factor: float, head: int, original: int) -> None:
    table = llama3_factors(500000.0, head, factor, original)

    def rope(writer: GGUFWriter) -> None:
        writer.add_rope_freq_base(500000.0)

    file = tmp_path / "m.gguf"
    tiny.write_tiny_gguf(file, extra={"rope_freqs.weight": table}, without=("rope_freq_base",), change=rope)
    weights = open_weights(file)
    assert weights.config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    assert not any("rope" in name for name in weights.names())
    plain = rope_of({"rope_theta": 500000.0}, head).frequency
    scaled = rope_of(weights.config, head).frequency
    torch.testing.assert_close(scaled, plain / torch.from_numpy(table), rtol=1e-5, atol=0)


def test_rope_factors_of_another_kind_are_refused(tmp_path: Path) -> None:
    odd = np.linspace(1, 8, tiny.HEAD // 2, dtype=np.float32)
    file = tiny.write_tiny_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": odd})
    with pytest.raises(UnsupportedError, match=f"{file} has rope factors that are not those of Llama 3"):
        open_weights(file)


def test_linear_rope_scaling_is_read_and_yarn_refused(tmp_path: Path) -> None:
    def scaling(kind: gguf.RopeScalingType) -> Any:
        def add(writer: GGUFWriter) -> None:
            writer.add_rope_scaling_type(kind)
            writer.add_rope_scaling_factor(4.0)

        return add

    linear = tiny.write_tiny_gguf(tmp_path / "linear.gguf", change=scaling(gguf.RopeScalingType.LINEAR))
    assert open_weights(linear).config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
    yarn = tiny.write_tiny_gguf(tmp_path / "yarn.gguf", change=scaling(gguf.RopeScalingType.YARN))
    with pytest.raises(UnsupportedError, match="rope scaling 'yarn'"):
        open_weights(yarn)


# Refusals


def test_every_truncation_is_refused_with_one_line(tmp_path: Path) -> None:
    file, cut = tiny.write_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "cut.gguf"
    data = file.read_bytes()
    end = max(int(t.data_offset + t.n_bytes) for t in gguf.GGUFReader(file).tensors)
    header = min(int(t.data_offset) for t in gguf.GGUFReader(file).tensors)
    for length in [*range(4, header, 311), header, (header + end) // 2, end - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(FormatError) as refused:
            open_weights(cut)
        assert str(refused.value).startswith(f"{cut} is truncated"), length
        assert "\n" not in str(refused.value)


def test_unknown_architectures_are_refused(tmp_path: Path) -> None:
    file = tiny.write_tiny_gguf(tmp_path / "m.gguf", "falcon")
    with pytest.raises(UnsupportedError, match=f"{file} is a 'falcon' model; Crelle reads llama"):
        open_weights(file)


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    file = tiny.write_tiny_gguf(tmp_path / "m.gguf", extra={"blk.0.ffn_gate_exps.weight": np.zeros((2, 4, 4), "f4")})
    with pytest.raises(UnsupportedError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        open_weights(file)


def test_one_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    file = tiny.write_tiny_gguf(tmp_path / "m.gguf", change=lambda w: w.add_uint16("split.count", 3))
    with pytest.raises(UnsupportedError, match=f"{file} is one of 3 parts"):
        open_weights(file)


def test_a_file_without_an_embedding_is_refused(tmp_path: Path) -> None:
    tensors = tiny.tiny_tensors("llama")
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("output_norm.weight", tensors["model.norm.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FormatError, match=r"has no tensor 'token_embd\.weight'"):
        open_weights(tmp_path / "m.gguf")


def test_a_type_that_nothing_decodes_is_refused(tmp_path: Path) -> None:
    tensors = tiny.tiny_tensors("llama")
    name = "model.layers.1.mlp.down_proj.weight"
    codes = np.zeros(tensors.pop(name).shape, dtype=np.int8)
    file = tiny.write_tiny_gguf(tmp_path / "m.gguf", tensors=tensors, extra={tiny.gguf_name(name): codes})
    with pytest.raises(UnsupportedError, match=r"'blk\.1\.ffn_down\.weight' is I8"):
        open_weights(file).read(name)


def test_unknown_names_are_a_sentence(tmp_path: Path) -> None:
    weights = open_weights(tiny.write_tiny_gguf(tmp_path / "m.gguf"))
    with pytest.raises(FormatError, match=r"has no tensor 'model\.layers\.7\.mlp\.up_proj\.weight'"):
        weights.read("model.layers.7.mlp.up_proj.weight")


def test_a_damaged_header_never_escapes_as_another_error(tmp_path: Path) -> None:
    file, bad = tiny.write_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "bad.gguf"
    data = file.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for at in random.integers(4, 1500, 60):
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        bad.write_bytes(damaged)
        try:
            open_weights(bad)
        except CrelleError:
            refused += 1
    assert refused > 0


# Encoded


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda k: k.name)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_encoded_matrices_are_the_same_numbers(tmp_path: Path, arch: str, kind: Type) -> None:
    file = tiny.write_tiny_gguf(tmp_path / "m.gguf", arch, kind=kind)
    plain, encoded = open_weights(file), open_weights(file, encoded=True)
    for name in plain.names():
        if len(plain.shape(name)) == 2:
            module = name.removesuffix(".weight")
            w = encoded.matrix(module)
            assert w.format == ("affine" if kind.name.endswith("_1") else "uniform")
            assert (w.bits, w.group, w.shape) == (int(kind.name[1]), 32, plain.shape(name))
            assert torch.equal(w.dequantize(), plain.read(name)), name
            assert torch.equal(encoded.read(name), plain.read(name))
            assert isinstance(plain.matrix(module), DenseTensor)


@pytest.mark.parametrize("kind", DTYPES, ids=lambda k: k.name)
def test_encoded_leaves_plain_types_plain(tmp_path: Path, kind: Type) -> None:
    weights = open_weights(tiny.write_tiny_gguf(tmp_path / "m.gguf", kind=kind), encoded=True)
    w = weights.matrix("model.layers.0.self_attn.q_proj")
    assert isinstance(w, DenseTensor)
    assert w.weight.dtype == DTYPES[kind]

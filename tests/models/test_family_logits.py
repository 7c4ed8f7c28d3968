"""Each family of crelle.models.families on a small random model of the real architecture, against transformers.

Logits of 200 tokens by one pass and by chunks; quantized by rtn and gptq, saved, loaded, generated from. There is more
about GPT-2 and Gemma in test_families.py, about Llama and OPT in test_llama_parity.py and test_opt.py.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import write_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from crelle import LLM, Sampling, quantize
from crelle.errors import CrelleError
from crelle.kernels.cpu.fused_decoder import FusedDecoder
from crelle.kernels.cuda.step.decode_step import supports as cuda_lacks
from crelle.models.families import families
from crelle.models.loader import load
from crelle.quantize_job.data import CalibrationData

TOKENS = 200
IDS = {"vocab_size": 259, "bos_token_id": 256, "eos_token_id": 258}
SIZES: dict[str, Any] = IDS | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "short_factor": [1.0 + i / 4 for i in range(8)], "long_factor": [9.0] * 8}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of transformers: its class, its config, and how it differs from what SIZES has."""

    name: str  # of the class, without ForCausalLM
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)
    quantized: bool = True  # whether it is quantized here too


CASES = {
    "gpt-neox": Case(name="GPTNeoX", options={"num_key_value_heads": 4}),
    "gpt-neox, one after the other": Case(
        name="GPTNeoX", options={"use_parallel_residual": False, "hidden_act": "gelu_new"}, quantized=False
    ),
    "gpt-j": Case(
        name="GPTJ",
        sizes=IDS | {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 256},
    ),
    "gpt-neo": Case(
        name="GPTNeo",
        sizes=IDS
        | {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 256, "window_size": 32}
        | {"attention_types": [[["global", "local"], 1]]},
    ),
    "phi-3": Case(name="Phi3", options={"sliding_window": 48}),
    "phi-3, longrope": Case(
        name="Phi3",
        options={"rope_parameters": LONG, "original_max_position_embeddings": 256, **{"max_position_embeddings": 1024}},
    ),
    "phi-4-mini": Case(
        name="Phi3",
        options={
            "rope_parameters": LONG
            | {"short_factor": [1.0, 1.5, 2, 3, 4, 5], "long_factor": [9.0] * 6, "partial_rotary_factor": 0.75},
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        },
        quantized=False,
    ),
    "starcoder2": Case(name="Starcoder2", options={"sliding_window": 48}),
    "granite": Case(
        name="Granite",
        options={"embedding_multiplier": 3.0, "attention_multiplier": 0.3}
        | {"residual_multiplier": 0.7, "logits_scaling": 0.5},
    ),
    "olmo-2": Case(name="Olmo2"),
    "smollm3": Case(name="SmolLM3", options={"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "glm": Case(name="Glm", options={"head_dim": 16}),
    "glm-4": Case(name="Glm4", options={"head_dim": 16}),
    "llama, linear": Case(
        name="Llama",
        options={"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        quantized=False,
    ),
    "llama, dynamic": Case(
        name="Llama",
        options={"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
        quantized=False,
    ),
    "llama, llama3": Case(
        name="Llama",
        options={
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
            | {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        },
        quantized=False,
    ),
    "qwen2, yarn": Case(name="Qwen2", options={"rope_parameters": YARN}),
    "qwen3, yarn with factors": Case(
        name="Qwen3",
        options={
            "head_dim": 16,
            "rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16, "truncate": False},
        },
        quantized=False,
    ),
    "mixtral": Case(name="Mixtral", options={"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": Case(
        name="Qwen2Moe",
        options=EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 64, "mlp_only_layers": [0]},
    ),
    "qwen3-moe": Case(name="Qwen3Moe", options=EXPERTS | {"num_experts": 4, "norm_topk_prob": True}),
    "gpt-oss": Case(
        name="GptOss",
        options={"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 32}
        | {"rope_parameters": YARN | {"truncate": False}},
    ),
}
MIXTURES = [name for name, case in CASES.items() if "num_experts_per_tok" in case.options]


def write_model(to: Path, case: Case) -> Path:
    """Save a model whose every tensor is random and matters."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{case.name}Config")(**case.sizes | case.options)
    model = getattr(transformers, f"{case.name}ForCausalLM")(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=0.3 if name.endswith("wte.weight") else p.shape[-1] ** -0.5)
            else:
                is_norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
                p.normal_(mean=float(is_norm), std=0.2 if "sinks" not in name else 1.0)
    model.save_pretrained(to)
    write_tokenizer(to)
    return to


def tokens(n: int = TOKENS) -> Tensor:
    return torch.randint(250, (1, n), generator=torch.Generator().manual_seed(3))


def theirs(path: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.inference_mode():
        return model(tokens()).logits


def ours(path: Path, *chunks: int) -> Tensor:
    model, _ = load(path, device="cpu")
    cache = model.new_cache()
    return torch.cat([model(part, cache) for part in tokens(sum(chunks)).split(chunks, dim=1)], dim=1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that were written already, by case."""
    root, made = tmp_path_factory.mktemp("families"), dict[str, Path]()

    class Written(dict[str, Path]):
        def __missing__(self, case: str) -> Path:
            self[case] = write_model(root / str(len(made) + len(self)), CASES[case])
            return self[case]

    return Written()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, paths: dict[str, Path]) -> None:
    """In one pass, and by a prompt, chunks and single tokens."""
    expected = theirs(paths[case])
    assert expected.std() > 0.3  # otherwise a small difference would mean nothing
    assert (ours(paths[case], TOKENS) - expected).abs().max() <= 1e-4
    assert (ours(paths[case], 110, 4, 36, *[1] * 50) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("case", CASES)
def test_the_fused_step_and_the_cuda_step_run_it(case: str, paths: dict[str, Path]) -> None:
    model, _ = load(paths[case], device="cpu")
    assert isinstance(model.decoder, FusedDecoder), model.decoder
    assert cuda_lacks(model.spec, torch.float16) is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", [name for name in CASES if name not in MIXTURES])
def test_on_a_gpu_in_half_precision(case: str, paths: dict[str, Path]) -> None:
    """A prompt and 40 steps of the CUDA executor choose tokens that are the best in f32, or nearly."""
    prompt, llm = tokens(60)[0].tolist(), LLM.load(paths[case], device="cuda")
    llm.end_ids = frozenset()
    made = llm.generate(prompt, Sampling(max_tokens=40)).tokens
    model, _ = load(paths[case], device="cpu")
    logits = model(torch.tensor([prompt + made]), model.new_cache())[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(made)[:, None])[:, 0]
    assert (logits.amax(-1) - chosen).max() < 0.05 * logits.std()


TEXT = CalibrationData(text="All that glitters is not gold, and many a man his life has sold. " * 40, rows=4, length=48)


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.quantized])
@pytest.mark.parametrize("scheme", ["rtn:bits=8,group=32", "gptq:bits=8,group=32"])
@pytest.mark.sample(3)
def test_quantized_saved_loaded_and_generated_from(
    case: str, scheme: str, paths: dict[str, Path], tmp_path: Path
) -> None:
    quantize(paths[case], tmp_path / "q", scheme, text=TEXT, device="cpu")
    full, coded = ours(paths[case], 60), ours(tmp_path / "q", 60)
    assert 0 < (full - coded).norm() < (0.3 if case in MIXTURES else 0.06) * full.norm()
    llm = LLM.load(tmp_path / "q", device="cpu")
    llm.end_ids = frozenset()
    prompts = [tokens(n)[0].tolist() for n in (2, 40, 17)]
    together = llm.generate(prompts, Sampling(max_tokens=6))
    assert [c.tokens for c in together] == [llm.generate([p], Sampling(max_tokens=6))[0].tokens for p in prompts]


def test_chatglm_is_glm_in_other_files(paths: dict[str, Path], tmp_path: Path) -> None:
    """Transformers has no ChatGLM3: a GLM with its tensors joined and named as THUDM's code does."""
    tensors, config = (
        load_file(paths["glm"] / "model.safetensors"),
        json.loads((paths["glm"] / "config.json").read_text()),
    )
    made = {}
    for name, t in tensors.items():
        name = name.replace("model.layers", "transformer.encoder.layers").replace(
            "self_attn.o_proj", "self_attention.dense"
        )
        name = name.replace("mlp.gate_up_proj", "mlp.dense_h_to_4h").replace("mlp.down_proj", "mlp.dense_4h_to_h")
        name = name.replace("model.embed_tokens", "transformer.embedding.word_embeddings")
        name = name.replace("model.norm", "transformer.encoder.final_layernorm").replace(
            "lm_head", "transformer.output_layer"
        )
        if ".self_attn." not in name:
            made[name] = t
    for i in range(2):
        for kind in ("weight", "bias"):
            qkv = [tensors[f"model.layers.{i}.self_attn.{slot}_proj.{kind}"] for slot in "qkv"]
            made[f"transformer.encoder.layers.{i}.self_attention.query_key_value.{kind}"] = torch.cat(qkv)
    save_file(made, tmp_path / "model.safetensors")
    sizes = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "kv_channels": 16}
    other = {"multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 259, "seq_length": 256}
    eps = {"layernorm_epsilon": config["rms_norm_eps"], "model_type": "chatglm"}
    (tmp_path / "config.json").write_text(json.dumps(sizes | other | eps))
    assert (ours(tmp_path, 200) - theirs(paths["glm"])).abs().max() <= 1e-4


HOSTILE: dict[str, tuple[str, dict[str, Any], str]] = {
    "rotary_pct of nothing": (
        "gpt-neox",
        {"rope_parameters": {"partial_rotary_factor": 0.01}},
        "rotates 0 of a head's",
    ),
    "use_parallel_residual": ("gpt-neox", {"use_parallel_residual": "yes"}, "'use_parallel_residual'"),
    "rotary_dim odd": ("gpt-j", {"rotary_dim": 7}, "'rotary_dim' is 7"),
    "rotary_dim wide": ("gpt-j", {"rotary_dim": 400}, "'rotary_dim' is 400"),
    "attention_types": ("gpt-neo", {"attention_types": [3], "attention_layers": None}, "'attention_types' should be"),
    "attention_layers": ("gpt-neo", {"attention_layers": ["global", "near"]}, "should be global or local"),
    "window_size": ("gpt-neo", {"window_size": -1}, "'window_size'"),
    "short_factor": (
        "phi-3, longrope",
        {"rope_parameters": LONG | {"short_factor": [1.0, 0.0]}},
        "'short_factor' should",
    ),
    "joined rows": ("phi-3", {"num_key_value_heads": 1}, "has 128 rows, which cannot be self_attn.q_proj"),
    "norm_epsilon": ("starcoder2", {"norm_epsilon": -1}, "'norm_epsilon'"),
    "residual_multiplier": ("granite", {"residual_multiplier": 1e9}, "'residual_multiplier'"),
    "logits_scaling": ("granite", {"logits_scaling": 0}, "'logits_scaling'"),
    "no_rope_layers": ("smollm3", {"no_rope_layers": [1, 2, 0, 1]}, "'no_rope_layers' should be 4 times"),
    "yarn's factor": ("qwen2, yarn", {"rope_parameters": YARN | {"factor": 0}}, "'factor'"),
    "yarn's range": ("qwen2, yarn", {"rope_parameters": YARN | {"beta_fast": 0.5}}, "'beta_slow' < 'beta_fast'"),
    "too few experts": ("mixtral", {"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9, but a layer has 4"),
    "no experts": ("mixtral", {"num_local_experts": None}, "lacks the key 'num_local_experts'"),
    "mlp_only_layers": ("qwen2-moe", {"mlp_only_layers": ["first"]}, "'mlp_only_layers' should be a list of layers"),
    "swiglu_limit": ("gpt-oss", {"swiglu_limit": 3.0}, "'swiglu_limit' is 3"),
    "layer_types": ("gpt-oss", {"layer_types": ["near", "far"]}, "'layer_types' should name"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_config_is_one_sentence(what: str, paths: dict[str, Path], tmp_path: Path) -> None:
    case, changes, sentence = HOSTILE[what]
    (tmp_path / "model.safetensors").symlink_to(paths[case] / "model.safetensors")
    config = json.loads((paths[case] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CrelleError, match=sentence) as e:
        load(tmp_path, device="cpu")
    assert "\n" not in str(e.value)


def test_every_family_has_a_case() -> None:
    """Or a test of its own."""
    elsewhere = {"bert", "opt", "gpt2", "gemma2", "gemma3_text", "mistral", "chatglm"}
    types = {getattr(transformers, f"{case.name}Config").model_type for case in CASES.values()}
    assert families().keys() == types | elsewhere

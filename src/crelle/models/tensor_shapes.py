"""The tensors from which a model of an architecture is loaded, with their shapes."""

from collections.abc import Iterator

from crelle.kernels.spec import Expert, NormSpec
from crelle.models.families.base import Architecture

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def tensor_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Return shapes by name, in the order in which the model runs; biases only where the architecture requires them."""
    return dict(_all(arch))


def _all(arch: Architecture) -> Shapes:
    s, names = arch.spec, arch.names
    embedded, narrow = s.embedding_width, s.embedding_width != s.width
    yield f"{names.embedding}.weight", (s.vocabulary, embedded)
    if s.learned_positions is not None:
        yield f"{names.positions}.weight", (s.context + s.learned_positions, s.width)
    if s.token_types:
        yield f"{names.token_types}.weight", (s.token_types, s.width)
    if s.embedding_norm is not None:
        yield from _norm(names.embedding_norm, s.width, s.embedding_norm)
    if narrow:
        yield f"{names.project_in}.weight", (s.width, embedded)
        yield f"{names.project_out}.weight", (embedded, s.width)
    for i in range(len(s.layers)):
        yield from _layer(arch, i)
    if s.norm is not None:
        yield from _norm(names.norm, s.width, s.norm)
    if not s.tied:
        yield f"{names.head}.weight", (s.vocabulary, embedded)


def _layer(arch: Architecture, i: int) -> Shapes:
    s, names, width = arch.spec.layers[i], arch.names, arch.spec.width
    a = s.attention

    def linear(slot: str, N: int, K: int, expert: Expert = None) -> Shapes:
        module = names.of_layer(i, slot, expert)
        yield f"{module}.weight", (N, K)
        if arch.required_biases and a.bias:
            yield f"{module}.bias", (N,)

    q, kv = a.heads * a.head_size, a.kv_heads * a.head_size
    yield from _norm(names.of_layer(i, "norm_attention"), width, s.norm)
    for slot, N, K in (("q", q, width), ("k", kv, width), ("v", kv, width), ("o", width, q)):
        yield from linear(slot, N, K)
    for slot, size in a.normed.items():
        assert a.qk_norm is not None
        yield from _norm(names.of_layer(i, slot), size, a.qk_norm)
    if a.sinks:
        yield names.of_layer(i, "sinks"), (a.heads,)
    for slot in ("post_attention_norm", "post_mlp_norm") if s.placement == "sandwich" else ():
        yield from _norm(names.of_layer(i, slot), width, s.norm)
    if not s.shared_norm:
        yield from _norm(names.of_layer(i, "norm_mlp"), width, s.norm)
    if s.mlp.experts is not None:
        yield from linear("router", s.mlp.experts.count, width)
    for expert in s.mlp.feed_forwards:
        inner = s.mlp.width_of(expert)
        for slot in ("gate", "up") if s.mlp.gated else ("up",):
            yield from linear(slot, inner, width, expert)
        yield from linear("down", width, inner, expert)
    if "shared" in s.mlp.feed_forwards:
        yield from linear("shared_gate", 1, width)


def _norm(module: str, size: int, spec: NormSpec) -> Shapes:
    if spec.affine:
        yield f"{module}.weight", (size,)
        if spec.kind == "layer":
            yield f"{module}.bias", (size,)

"""Our own kernels compile for every architecture, with their matrix instruction and without spills."""

import re
from pathlib import Path

import pytest
from changed_sources import changed_sources
from disassembly import LOCAL_MEMORY, MATRIX, SassFacts, disassemble, loads_in_flight, sass_facts

from crelle.kernels import cuda
from crelle.kernels.cuda import jit
from crelle.kernels.cuda.runtime.instantiations import Instantiation, instantiations

pytestmark = pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))

MATRIX_FILES = {
    "experts/fp4_expert_gemm.cu",
    "experts/fp4_expert_gemv.cu",
    "fp4/fp4_gemm.cu",
    "fp4/fp4_gemv.cu",
    "planes/bmma_gemv.cu",
    "planes/gemm.cu",
    "integer/integer_gemm.cu",
    "mixed/mixed_decode.cu",
    "mixed/mixed_gemm.cu",
    "mixed/mixed_gemv.cu",
    "trellis/trellis_gemv.cu",
}


@pytest.mark.parametrize(
    ("line", "local", "matrix"),
    [
        ("/*0010*/   LDL.64 R2, [R1] ;", True, False),
        ("/*0010*/   @P0 STL [R1+0x8], R4 ;", True, False),
        ("/*0010*/   LDG.E.128 R4, [R2.64] ;", False, False),
        ("/*0010*/   IMMA.16832.S8.S8 R8, R4.ROW, R6.COL, R8 ;", False, True),
        ("/*0010*/   BMMA.168256.AND.POPC R8, R4, R6, R8 ;", False, True),
        ("/*0010*/   HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;", False, True),
    ],
)
def test_the_markers_tell_instructions_apart(line: str, local: bool, matrix: bool) -> None:
    assert (bool(LOCAL_MEMORY.search(line)), bool(MATRIX.search(line))) == (local, matrix)


SPILLS = """
namespace test {
__global__ void spills(const int* at, int* y) {
  int room[64];
  for (int i = 0; i < 64; i++) room[at[i]] = i;
  for (int i = 0; i < 64; i++) y[i] = room[at[i + 64]];
}
}
"""


def test_local_memory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spills.cu").write_text(SPILLS)
    monkeypatch.setattr(jit, "SOURCES", tmp_path)
    monkeypatch.setenv("CRELLE_CACHE", str(tmp_path / "cache"))
    if (code := disassemble(jit.compile("spills.cu", "test::spills", "sm_90a").cubin)) is None:
        pytest.skip("no disassembler")
    assert LOCAL_MEMORY.search(code)


def spills_allowed(file: str, expression: str, arch: str) -> int:
    """How many instructions may go to local memory: a few, around the loop, in what was measured to be fastest so."""
    planes = re.match(r"crelle::bmma_gemv<(\d)", expression)
    if planes:
        few = 16 if "GELU" in expression else 8  # erf and tanh, behind the loop
        return 80 if int(planes[1]) > 4 else few if arch == "sm_90a" else 40
    if expression.startswith(("crelle::mixed_gemv<2, 8,", "crelle::mixed_decode<true, 2,")):
        return 8  # groups of 8, 8 tokens; other prologues than Llama's
    if expression.startswith("crelle::mixed_decode<false, 2, 12,"):
        return 8  # by NVRTC 13.0; none by 13.4
    if file == "solver/viterbi.cu":
        return 16  # before and after a search, of 128 weights
    if file == "mixed/mixed_gemm.cu":
        return 48  # three warpgroups: 128 registers a thread
    return 24 if file in ("dense/dense.cu", "lut/lut.cu", "planes/gemm.cu") else 0


def sampled(found: list[Instantiation], each: int = 2) -> list[Instantiation]:
    """Return a few variants of each template, evenly spaced: disassembling takes as long as compiling."""
    templates: dict[tuple[str, str], list[Instantiation]] = {}
    for file, expression in found:
        templates.setdefault((file, expression.partition("<")[0]), []).append((file, expression))
    return [kept[i] for kept in templates.values() for i in range(0, len(kept), -(-len(kept) // each))]


def check_variants(found: list[Instantiation], arch: str, disassembled: list[Instantiation]) -> None:
    """Compile variants; look at the instructions of some where there is a disassembler."""
    wrong = []
    for built in jit.compile_all(found, arch):
        assert built.cubin
        if (built.file, built.expression) not in disassembled or (facts := sass_facts(built.cubin)) is None:
            continue
        if facts.local_memory > spills_allowed(built.file, built.expression, arch):
            wrong.append(f"{built.file} {built.expression}: local memory")
        if built.file in MATRIX_FILES and not facts.matrix:
            wrong.append(f"{built.file} {built.expression}: no matrix instruction")
    assert not wrong, f"{arch}: " + "; ".join(wrong)


FILES = sorted({file for arch in jit.ARCHITECTURES for file, _ in instantiations(arch)}) if not jit.missing() else []


@pytest.mark.parametrize("file", FILES)
def test_every_template_compiles_and_a_sample_stays_in_registers(file: str) -> None:
    """Six variants of each template of a source that changed, one of the others."""
    found = [v for v in instantiations("sm_90a") if v[0] == file]
    changed = changed_sources(jit.SOURCES) or set()
    some = sampled(found, 6 if changed & jit._sources(file).keys() else 1)
    check_variants(some, "sm_90a", sampled(some))


def test_a_sample_has_every_template() -> None:
    found = instantiations("sm_90a")
    names = [{(file, name.partition("<")[0]) for file, name in some} for some in (found, sampled(found))]
    assert names[0] == names[1]
    assert len(set(sampled(found))) == len(sampled(found))
    assert set(sampled(found)) <= set(found)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("arch", jit.ARCHITECTURES)
def test_every_variant_compiles_and_stays_in_registers(arch: str, file: str) -> None:
    """Each for each architecture, of which `make test` takes samples."""
    found = [v for v in instantiations(arch) if v[0] == file]
    check_variants(found, arch, found)


@pytest.mark.parametrize("arch", [arch for arch in jit.ARCHITECTURES if arch != "sm_90a"])
def test_variants_of_changed_sources_compile_and_stay_in_registers(arch: str) -> None:
    """A sample, for the architectures that `make test` does not compile whole."""
    if (changed := changed_sources(jit.SOURCES)) is None:
        pytest.skip(f"no git repository tells which sources changed; `make test-slow` compiles all of them for {arch}")
    found = sampled([v for v in instantiations(arch) if changed & jit._sources(v[0]).keys()])
    check_variants(found, arch, found)


@pytest.mark.parametrize(
    ("instructions", "count"),
    [
        ("LDS.64 R4, [R2] ; UBLKCP.S.G [UR6], [UR8], UR10 ;", 2),
        ("LDS R4, [R2] ; @P0 IADD3 R5, R4, R1, RZ ; UBLKCP.S.G [UR6], [UR8], UR10 ;", 0),
        ("LDS.128 R4, [R2] ; HMMA.16816.F32 R8, R4, R12, R8 ; UBLKCP.S.G [UR6], [UR8], UR10 ;", 0),
        ("LDS.128 R4, [R2] ; FADD R8, R5, R8 ; UBLKCP.S.G [UR6], [UR8], UR10 ;", 0),
        ("UBLKCP.S.G [UR6], [UR8], UR10 ; LDS R4, [R2] ;", 0),
        ("LDS R4, [R2] ; BRA `(.L_x_1) ; UBLKCP.S.G [UR6], [UR8], UR10 ;", 0),
        ("LDS R4, [R2] ; @P0 BRA `(.L_x_1) ; UBLKCP.S.G [UR6], [UR8], UR10 ;", 1),
        ("@P0 LDS R4, [R2] ; @P0 BRA `(.L_x_1) ; UBLKCP.S.G [UR6], [UR8], UR10 ;", 0),
        ("@P0 LDS R4, [R2] ; ISETP.NE.AND P0, PT, R1, RZ, PT ; @P0 BRA `(.L_x_1) ; UBLKCP.S.G [UR6], [UR8], UR10 ;", 1),
        ("LDS R4, [R2] ; BRA `(.L_x_1) ; IADD3 R5, R4, R1, RZ ;\n.L_x_1:\n UBLKCP.S.G [UR6], [UR8], UR10 ;", 1),
    ],
)
def test_loads_in_flight_are_found(instructions: str, count: int) -> None:
    code = "\n".join(
        re.sub(r"^(\.L_\w+:\s+)?", rf"\1/*{16 * i:04x}*/ ", line.strip()) + " ;"
        for i, line in enumerate(instructions.split(";")[:-1])
    )
    assert len(loads_in_flight(code)) == count


def test_loads_in_flight_have_the_offset_of_their_address() -> None:
    code = "/*0000*/ LDS.64 R4, [R2+0x1200] ;\n/*0010*/ LDS R8, [R3] ;\n/*0020*/ UBLKCP.S.G [UR6], [UR8], UR10 ;"
    assert loads_in_flight(code) == (0, 0x1200, 0x1200)


def pieces_end(expression: str) -> int:
    """Return an offset that no load from a piece has: all warps use the same one, and the pieces of warp 0 lie below.

    A GEMV that encodes x itself (PROLOGUE) keeps the digits behind the pieces of all warps and reads them one step
    ahead; the copy engine never writes there.
    """
    gemv = re.match(r"crelle::bmma_gemv<(\d), crelle::\w+, \d, \d, 1, (\d+), (\d+), (\d+),", expression)
    if gemv is None or "crelle::ENCODED" in expression:
        return 1 << 30
    planes, warps, run, stages = map(int, gemv.groups())
    return warps * stages * run * planes * 512


@pytest.mark.parametrize("each", [2, pytest.param(1 << 30, marks=pytest.mark.slow)])
def test_no_piece_is_overwritten_while_it_is_read(each: int) -> None:
    """A load can take long, and the copy engine does not wait for it (one tile a warp, one place each)."""
    one_tile = re.compile(
        r"bmma_gemv<\d, crelle::\w+, \d, \d, 1,|gemm_sm90<|skinny_gemm<|mixed_gemv<|mixed_decode<|trellis_gemv_sm90<"
        r"|fp4_gem[mv]_sm90<|fp4_expert_\w+<"
    )
    wrong = []
    found = sampled([v for v in instantiations("sm_90a") if one_tile.search(v[1])], each)
    for built in jit.compile_all(found, "sm_90a"):
        if (facts := sass_facts(built.cubin)) is None:
            pytest.skip("no disassembler")
        if loads := [offset for offset in facts.loads_in_flight if offset < pieces_end(built.expression)]:
            wrong.append(f"{built.expression}: {len(loads)}")
    assert not wrong, "; ".join(wrong)


def test_facts_are_kept_and_a_damaged_file_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spills.cu").write_text(SPILLS)
    monkeypatch.setattr(jit, "SOURCES", tmp_path)
    monkeypatch.setenv("CRELLE_CACHE", str(tmp_path / "cache"))
    cubin = jit.compile("spills.cu", "test::spills", "sm_90a").cubin
    if (facts := sass_facts(cubin)) is None:
        pytest.skip("no disassembler")
    assert facts.local_memory > 0
    (path,) = (tmp_path / "cache" / "sass").iterdir()
    path.write_text("{")
    assert sass_facts(cubin) == facts
    path.write_text('{"local_memory": 7, "matrix": true, "loads_in_flight": [3]}')
    assert sass_facts(cubin) == SassFacts(7, True, (3,))
    assert sass_facts(jit.compile("spills.cu", "test::spills", "sm_80").cubin) != SassFacts(7, True, (3,))


def test_every_source_lies_in_the_package() -> None:
    assert Path(cuda.__file__).parent == jit.SOURCES
    assert {file for file, _ in instantiations("sm_90a")} <= {
        str(p.relative_to(jit.SOURCES)) for p in jit.SOURCES.rglob("*.cu")
    }

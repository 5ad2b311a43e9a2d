# Everything a developer does, on a machine with Python 3.11+, make and, for speed, a C compiler.
# `make help` lists the targets. Variables: PYTHON, WORKERS, GPU_PYTHON, PYTEST_ARGS, SEED, SYSTEM.

PYTHON ?= python3
GPU_PYTHON ?= python3
PYTEST_ARGS ?=
MUTATE ?= deep500_timing/_summary/text.py
# Processes that share the files of tests, 2 GB each; 0 runs all in one. On two processors, three: a quarter of the time
# is waiting for others.
WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin
# Slow files start first (tests/support), which xdist would undo.
PYTEST = pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ORDER)
ORDER := -p no:randomly
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
CORE_VERSIONS := 3.11 3.12 3.13
# What needs the core and its test tools alone.
CORE_TESTS := tests/core tests/named_timers tests/launch/test_launch.py
# What depends on the form of the hot path, compiled or plain.
BOTH_FORMS := tests/core tests/named_timers tests/torch tests/runs/test_log.py tests/torch_comm/test_one_rank.py

# What an installation depends on, and what is compiled into it.
RECIPE := pyproject.toml constraints.txt hatch_build.py
COMPILED := $(foreach pxd,$(shell find deep500_timing adapters -name "*.pxd"),$(pxd) $(pxd:.pxd=.py))
SOURCES := $(shell find deep500_timing adapters -name '*.py' -o -name '*.pxd' -o -name py.typed)

# What was compiled once is not compiled again, where ccache is: its folder's `cc` stands before the system's.
export PATH := /usr/lib/ccache:$(PATH)
export CCACHE_DIR := $(CURDIR)/build/caches/ccache
export CCACHE_BASEDIR := /
export CCACHE_NOHASHDIR := true

# The first interpreter of a version that runs and can make virtual environments: a pyenv shim on PATH may refuse,
# so pyenv's and uv's own folders are looked into as well.
find-python = $(shell for python in python$(1) \
	"$${PYENV_ROOT:-$$(pyenv root 2>/dev/null || echo "$$HOME/.pyenv")}"/versions/$(1).*/bin/python$(1) \
	"$$HOME"/.local/share/uv/python/cpython-$(1).*/bin/python$(1); do \
	if "$$python" -c 'import ensurepip, sys, venv; sys.exit("%d.%d" % sys.version_info[:2] != "$(1)")' \
	>/dev/null 2>&1; then echo "$$python"; break; fi; done)

.DEFAULT_GOAL := help
# But the environments of `make test-core`.
ifndef TOGETHER
.NOTPARALLEL:
endif
.DELETE_ON_ERROR:
.PRECIOUS: .venvs/%/.stamp-tools
# Packages are installed uncompiled: where this is set, each of the suite's processes would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup demo test test-random test-quick test-matrix test-core core-environments test-plain coverage test-gpu test-rehearsal gpu-session gpu-site rehearse-gpu-session test-oldest test-zoo asan fuzz mutants \
	wheels release-check docs docs-outputs gallery pictures lint format bench bench-quick accuracy findings clean

help:
	@echo "make setup        the package and all that its tests need, in $(VENV)"
	@echo "make demo         train on the digits with PyTorch and with Keras, and show where the time went"
	@echo "make test         every test on one configuration, in a fixed order"
	@echo "make test-random  the same in a random order; SEED=N repeats one"
	@echo "make test-matrix  in plain Python, on other Pythons, other backends and launchers, pages, examples, the wheel"
	@echo "make test-quick   what most changes need, in under 90 seconds"
	@echo "make coverage     what depends on the form, plain, and all the rest, with the lines that no test passes through"
	@echo "make test-gpu     the tests that need a GPU, with the PyTorch of GPU_PYTHON ($(GPU_PYTHON)); installs nothing"
	@echo "make test-rehearsal  PyTorch's CUDA code over libraries that only keep time, without a GPU (4 GB, minutes)"
	@echo "make gpu-session  all that a GPU can show, into benchmarks/GPU.md, with the PyTorch of GPU_PYTHON; under 8 minutes"
	@echo "make gpu-site     the compiled packages for GPU_VERSION ($(GPU_VERSION)) in build/gpu-site, to carry to that machine"
	@echo "make rehearse-gpu-session  the same session on the rehearsal's stand-ins, into build/gpu-rehearsal.md"
	@echo "make test-oldest  with the oldest versions that pyproject.toml admits"
	@echo "make asan         the core's tests on a core compiled with AddressSanitizer and checked bounds"
	@echo "make test-zoo     layer timing on 31 public models, in autograd nodes"
	@echo "make test-peers   PyTorch's own tests, and DeepSpeed's (DEEPSPEED_SOURCE=its sources), against ours"
	@echo "make fuzz         the properties with a thousand new examples each, 200 programs and 2000 changed files at random"
	@echo "make mutants      mutation testing of MUTATE=FILE with TESTS=FOLDER, by cosmic-ray"
	@echo "make docs         the documentation site, strictly, in build/site"
	@echo "make docs-outputs  the outputs that the tutorials and the pages by question show, printed again"
	@echo "make gallery      docs/gallery.md: ten problems, their reports and remedies; about ten minutes"
	@echo "make pictures     docs/report.png, by a browser"
	@echo "make wheels       a wheel for each Python at hand, and an sdist, in dist"
	@echo "make release-check  the wheels, and each in an empty environment"
	@echo "make lint         ruff, mypy --strict, pyright"
	@echo "make format       let ruff rewrite the tree"
	@echo "make bench        speed and memory against the peers, into benchmarks/RESULTS.md and benchmarks/RUN.md"
	@echo "                  BEFORE=a commit: what is more than 10 % slower than it was there, in one run"
	@echo "make bench-quick  the same in under two minutes"
	@echo "make accuracy     measured against true times, into benchmarks/ACCURACY.md"
	@echo "make findings     what is said of planted faults and of healthy runs, into benchmarks/FINDINGS.md"
	@echo "make clean        remove what these commands left, the environments included"

# --- Set-up: each stamp is one step, done again only if what it depends on changed ---------------------------------

setup: $(VENV)/.stamp-system $(VENV)/.stamp-requirements $(VENV)/.stamp-package

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make setup needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) -V 2>&1`." \
			"Name another one: make setup PYTHON=/path/to/python3"; exit 1; }
	@echo "setup: a virtual environment in $(VENV) with `$(PYTHON) -V`"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-build: pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP) install --quiet --constraint constraints.txt pip setuptools
	@$(PIP) install --quiet --constraint constraints.txt --group build
	@touch $@

$(VENV)/.stamp-package: $(VENV)/.stamp-build $(RECIPE) $(COMPILED)
	@echo "setup: deep500-timing itself, editable, compiled where a C compiler is"
	@$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable .
	@cd / && $(CURDIR)/$(BIN)/python -c 'import deep500_timing as d; \
		print("setup: the hot path is compiled" if d.compiled else \
		"setup: the hot path is plain Python (no compiler? try `DEEP500_TIMING_BUILD=compiled $(MAKE) setup`)")'
	@touch $@

# Modules are compiled when they are first imported: a few of those that the frameworks bring ever are.
$(VENV)/.stamp-demo: $(VENV)/.stamp-build
	@echo "setup: what the demo needs: PyTorch, Keras, the trackers (some GB, minutes)"
	@$(PIP) install --quiet --no-compile --constraint constraints.txt --group demo
	@touch $@

$(VENV)/.stamp-requirements: $(VENV)/.stamp-build
	@echo "setup: what the tests need, as pinned in constraints.txt (several GB, minutes)"
	@$(PIP) install --quiet --no-compile --constraint constraints.txt --group test --group lint
	@# tf_keras asks for `tensorflow`, whose files are the ones that tensorflow-cpu has already put there.
	@$(PIP) install --quiet --no-compile --constraint constraints.txt --no-deps tf_keras
	@echo "setup: the peers to compare with"
	@DS_BUILD_OPS=0 $(PIP) install --quiet --constraint constraints.txt --no-build-isolation --group peers
	@touch $@

$(VENV)/.stamp-bench: $(VENV)/.stamp-requirements $(VENV)/.stamp-package
	@echo "setup: the benchmarks' peers"
	@$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --group bench
	@touch $@

# What pip cannot bring: named, and installed from Debian's packages by `make setup SYSTEM=1`. Without it tests are skipped.
$(VENV)/.stamp-system: system-packages.txt | $(BIN)/python
	@absent() { sed 's/#.*//' $< | while read -r program package; do \
		test -z "$$program" || command -v "$$program" >/dev/null || echo "$$package"; done; }; \
	if test -n "`absent`" && test -n "$(SYSTEM)"; then \
		echo "setup: of the system's packages:" `absent`; \
		export DEBIAN_FRONTEND=noninteractive; quietly="-qq -o DPkg::Lock::Timeout=300"; \
		{ apt-get $$quietly update && apt-get $$quietly install -y --no-install-recommends `absent`; } \
			</dev/null >$@.log 2>&1 || tail -n 5 $@.log; \
	fi; \
	if test -n "`absent`"; then echo "setup: tests that need packages of the system are skipped; to install them:" \
		"apt-get install -y --no-install-recommends" `absent`; else touch $@; fi

# The wheel, not the tree, in an environment with the core's one dependency and no framework, nor what builds the wheel.
# The tree's pip installs there: one of its own would cost five seconds of the processor.
PIP_FOR = $(PIP) --python .venvs/$*/bin/python install --quiet --no-compile --constraint constraints.txt
.venvs/%/.stamp-tools: $(VENV)/.stamp-build pyproject.toml constraints.txt
	@echo "setup: .venvs/$* with $(call find-python,$*)"
	@test -x .venvs/$*/bin/python || $(call find-python,$*) -m venv --without-pip .venvs/$*
	@rm -rf .venvs/$*/builds
	@$(PIP_FOR) --group core
	@$(PIP_FOR) --target .venvs/$*/builds --group build
	@touch $@

.venvs/%/.stamp: .venvs/%/.stamp-tools $(RECIPE) $(SOURCES)
	@PYTHONPATH=.venvs/$*/builds $(PIP_FOR) --no-build-isolation .
	@touch $@

# The oldest versions that pyproject.toml admits, with the newest test tools. MLflow 2.16 does not bound SQLAlchemy.
.venvs/oldest/.stamp: $(RECIPE) $(SOURCES) | $(VENV)/.stamp-build
	@test -x .venvs/oldest/bin/python || $(call find-python,3.11) -m venv .venvs/oldest
	@$(PIP) install --quiet uv
	@$(BIN)/uv pip install --quiet --python .venvs/oldest/bin/python --resolution lowest-direct \
		--override tests/oldest.txt ".[report,system,mlflow,wandb]" keras tensorflow-cpu
	@$(BIN)/uv pip install --quiet --python .venvs/oldest/bin/python --group core --group build
	@touch $@

# --- Use -----------------------------------------------------------------------------------------------------------

demo: $(VENV)/.stamp-package $(VENV)/.stamp-demo
	@$(BIN)/python examples/demo.py

# On one configuration, as users run it: ten minutes on two cores.
test: setup
	@$(BIN)/$(PYTEST) -m "not matrix" $(PYTEST_ARGS)

test-random: setup
	@seed=$(or $(SEED),`od -An -N4 -tu4 /dev/urandom`); echo "test: make test-random SEED=$$((seed)) repeats this order"; \
		$(MAKE) -s test ORDER="--randomly-seed=$$((seed))"

# What repeats it on others, and what runs pages, examples, the wheel and other launchers. CI runs both.
test-matrix: test-plain test-core
	@echo "test: other backends, launchers, models and scripts, pages, examples, the wheel"
	@$(BIN)/$(PYTEST) -m matrix $(PYTEST_ARGS)

# What a change most often breaks, without a step of building: no servers, ranks, fits or examples.
test-quick: setup
	@DEEP500_TIMING_PURE=1 $(BIN)/$(PYTEST) -m "not slow" --durations 5 --durations-min 2 $(PYTEST_ARGS)

# The Python of the tree's environment: `make test` runs the core on it.
TREE_VERSION = $(shell $(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')

OTHER_VERSIONS = $(filter-out $(TREE_VERSION),$(CORE_VERSIONS))
test-core: $(BIN)/python core-environments
	@for version in $(OTHER_VERSIONS); do $(MAKE) -s --no-print-directory test-core-$$version || exit; done

# Most of a set-up is of one processor: several at a time, as many as there are processes for tests.
CORE_STAMPS = $(foreach version,$(OTHER_VERSIONS),$(if $(call find-python,$(version)),.venvs/$(version)/.stamp))
core-environments:
	@set -- $(CORE_STAMPS); test $$# = 0 || \
		$(MAKE) -s --no-print-directory -j$(or $(filter-out 0,$(WORKERS)),1) TOGETHER=1 $$*

test-core-%:
	@$(if $(call find-python,$*),$(MAKE) -s --no-print-directory .venvs/$*/.stamp && \
		echo "test: the core on Python $* from the wheel" && \
		.venvs/$*/bin/$(PYTEST) $(PYTEST_ARGS) $(CORE_TESTS) && \
		echo "test: the same in plain Python" && \
		DEEP500_TIMING_PURE=1 .venvs/$*/bin/$(PYTEST) -m "not one_form" $(PYTEST_ARGS) $(CORE_TESTS), \
		echo "test: Python $* is not on this machine; the core's tests are not run on it")

test-plain: setup
	@echo "test: what depends on the form of the hot path, in plain Python"
	@DEEP500_TIMING_PURE=1 $(BIN)/$(PYTEST) -m "not one_form and not matrix" $(PYTEST_ARGS) $(BOTH_FORMS)

# Beside `make test`, whose tests take a fifth longer while they are measured.
coverage: setup
	@$(BIN)/coverage erase
	@$(MAKE) -s test-plain PYTEST_ARGS="--cov --cov-report= $(PYTEST_ARGS)"
	@$(BIN)/$(PYTEST) --cov --cov-append --cov-report=term $(PYTEST_ARGS)

# A machine with a GPU brings its own PyTorch and CuPy; the tree runs there as it lies, in plain Python.
# Only the files that hold such tests are read: the others may ask for what is not installed there.
GPU_TESTS = $(shell grep -rlE 'mark\.gpu' tests --include='test_*.py')
test-gpu:
	@PYTHONPATH=.:adapters $(GPU_PYTHON) -m pytest -m gpu $(PYTEST_ARGS) $(or $(GPU_TESTS),$(error no test is marked gpu))

include maintain.mk

# What a release consists of, in dist/: for each Python at hand a compiled wheel, a pure wheel, an sdist.
RELEASE_PYTHONS = $(foreach version,$(CORE_VERSIONS),$(call find-python,$(version)))
$(VENV)/.stamp-release: $(VENV)/.stamp-build pyproject.toml
	@$(PIP) install --quiet --constraint constraints.txt --group release
	@touch $@

wheels: $(VENV)/.stamp-release
	@$(BIN)/python tools/release.py wheels $(RELEASE_PYTHONS)

release-check: wheels
	@$(BIN)/python tools/release.py check $(RELEASE_PYTHONS)

$(VENV)/.stamp-docs: $(VENV)/.stamp-build pyproject.toml
	@$(PIP) install --quiet --constraint constraints.txt --group docs
	@touch $@

# Strict: a dead link or a missing page is an error. The site is in build/site.
docs: $(VENV)/.stamp-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@$(BIN)/python tests/docs/check_reference.py build/site
	@$(BIN)/codespell --ignore-words-list restor README.md CHANGELOG.md docs adapters/README.md deep500_timing adapters

# What the pages show is printed again: the outputs of the tutorials and of the pages by question, and the gallery.
PAGES ?= $(wildcard docs/tutorials/*.md) $(addprefix docs/,how-to.md ranks.md compare.md goodput.md)
docs-outputs: setup
	@$(BIN)/python tools/page_outputs.py $(PAGES)

gallery: setup
	@$(BIN)/python tools/page_outputs.py docs/gallery.md

# The picture of the page, by a browser: CHROMIUM names one if playwright has none.
pictures: setup
	@$(BIN)/python tools/pictures.py

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/pyright
	@$(BIN)/python tools/size.py
	@$(BIN)/python tools/words.py *.md adapters/README.md tests/README.md $$(find docs -name '*.md') \
		deep500_timing adapters tests benchmarks examples tools

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.stamp-bench
	@$(BIN)/python -m benchmarks$(if $(BEFORE),.bench_before_after --before $(BEFORE))
	@$(if $(BEFORE),,$(BIN)/python -m benchmarks.bench_run)

bench-quick: $(VENV)/.stamp-bench
	@$(BIN)/python -m benchmarks --quick
	@$(BIN)/python -m benchmarks.prices

accuracy: $(VENV)/.stamp-bench
	@$(BIN)/python benchmarks/accuracy.py

findings: $(VENV)/.stamp-bench
	@$(BIN)/python -m benchmarks.findings

clean:
	rm -rf $(VENV) .venvs build dist demo-output .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
	find deep500_timing adapters \( -name "*.so" -o -name "*.pyd" -o -name "*.c" \) -delete

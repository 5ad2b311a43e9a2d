# What few ever run: rehearsals of a GPU, sanitizers, mutants, models and originals of others. Included by the Makefile.

# Not in CI: 4 GB. PyTorch's own CUDA build over libraries that compute nothing (tests/rehearsal/README.md).
# Another folder for the environment: make test-rehearsal REHEARSAL=/path
REHEARSAL ?= $(CURDIR)/.venvs/rehearsal
$(REHEARSAL)/.stamp: tests/rehearsal/requirements.txt
	@test -n "$(call find-python,3.12)" || { echo "make test-rehearsal needs Python 3.12, as PyTorch's CUDA build" \
		"for the tests; install it with \`pyenv install 3.12\` or \`uv python install 3.12\`"; exit 1; }
	@echo "setup: $(REHEARSAL) with PyTorch's CUDA build (4 GB, minutes)"
	@test -x $(REHEARSAL)/bin/python || $(call find-python,3.12) -m venv $(REHEARSAL)
	@$(REHEARSAL)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -r tests/rehearsal/requirements.txt
	@touch $@

$(REHEARSAL)/fake/libfakecuda.so: $(REHEARSAL)/.stamp tests/rehearsal/fakecuda.cpp tests/rehearsal/build_fakes.py
	@$(REHEARSAL)/bin/python tests/rehearsal/build_fakes.py $(REHEARSAL)/fake

test-rehearsal: $(REHEARSAL)/fake/libfakecuda.so
	@DEEP500_TIMING_REHEARSAL=$(REHEARSAL)/fake DEEP500_TIMING_PURE=1 PYTHONPATH=.:adapters \
		$(REHEARSAL)/bin/python -m pytest --timeout 900 $(PYTEST_ARGS) $(or $(TESTS),tests/rehearsal)

# What a section needs and does not find it says in its line; without a GPU nothing is written. The compiled packages of
# build/gpu-site are used where they are for that Python.
gpu-session:
	@PYTHONPATH=.:adapters $(GPU_PYTHON) -m benchmarks.gpu $(SECTIONS)

# The packages of the wheel, compiled for the Python of a machine that cannot build them. Carry build/gpu-site with the
# tree: version control ignores it.
GPU_VERSION ?= 3.12
gpu-site: .venvs/$(GPU_VERSION)/.stamp
	@rm -rf build/gpu-site && mkdir -p build/gpu-site
	@cp -r .venvs/$(GPU_VERSION)/lib/python$(GPU_VERSION)/site-packages/deep500_timing* build/gpu-site

# The session on the rehearsal's stand-ins, in small sizes. Its figures say nothing; its page shows that it runs.
rehearse-gpu-session: $(REHEARSAL)/fake/libfakecuda.so
	@DEEP500_TIMING_REHEARSAL=$(REHEARSAL)/fake LD_LIBRARY_PATH=$(REHEARSAL)/fake \
		LD_PRELOAD=$(REHEARSAL)/fake/libfakecuda.so PYTHONPATH=.:adapters \
		$(REHEARSAL)/bin/python -m benchmarks.gpu --small --page build/gpu-rehearsal.md $(SECTIONS)

# Not in CI, as it installs TensorFlow once more. What needs PyTorch or CuPy is skipped.
OLDEST_TESTS := tests/core tests/named_timers tests/exporters tests/runs $(wildcard tests/tensorflow/test_keras*.py)
test-oldest: .venvs/oldest/.stamp
	@.venvs/oldest/bin/$(PYTEST) $(PYTEST_ARGS) $(OLDEST_TESTS)

# Not in CI: three times as slow. What a test starts is sanitized as well. Left out is the one that forks while threads
# allocate, as the child may find the sanitizer's own locks held.
asan: setup
	@echo "asan: the compiled core with AddressSanitizer and checked bounds"
	@$(BIN)/python tests/support/suite_sanitized.py
	@PYTHONPATH=$(CURDIR)/build/asan LD_PRELOAD=`$(or $(CC),cc) -print-file-name=libasan.so` PYTHONMALLOC=malloc \
		ASAN_OPTIONS=detect_leaks=0 $(BIN)/pytest -p no:cacheprovider \
		--deselect tests/core/test_lifecycle.py::TestFork::test_forks_amid_everything $(PYTEST_ARGS) tests/core

# Not in CI, as it installs model libraries. Without their dependencies: they would replace the PyTorch of the tree.
test-zoo: setup
	@$(PIP) install --quiet --no-deps --constraint constraints.txt --group zoo
	@$(BIN)/$(PYTEST) $(PYTEST_ARGS) tests/torch_layers/test_zoo.py

# Not in CI: the originals' own tests, which take minutes. DeepSpeed's are in its sources alone.
test-peers: setup
	@DEEP500_TIMING_TEST_ORIGINALS=1 DEEPSPEED_SOURCE="$(DEEPSPEED_SOURCE)" $(BIN)/pytest $(PYTEST_ARGS) tests/peers

# Not in CI, where the properties are held against the same examples each time: here against new ones, and many.
fuzz: setup
	@$(BIN)/$(PYTEST) -m hypothesis --hypothesis-profile fuzz $(PYTEST_ARGS)
	@$(BIN)/$(PYTEST) --fuzz-seeds 200 $(PYTEST_ARGS) tests/core/test_fuzz.py tests/ranks/test_exchange_schedules.py
	@$(BIN)/$(PYTEST) --mutations $(or $(MUTATIONS),2000) $(PYTEST_ARGS) tests/runs/test_mutations.py

# Not in CI: a module takes minutes. Plain form, one module at a time; the tree must be committed, since files are edited.
mutants: setup
	@git diff --quiet || { echo "make mutants edits files in place: commit or stash first"; exit 1; }
	@$(PIP) install --quiet --constraint constraints.txt --group mutants
	@mkdir -p build/mutants && rm -f build/mutants/session.sqlite
	@sed 's#MODULE#$(MUTATE)#; s#TESTS#$(or $(TESTS),tests/core)#' tests/mutants.toml > build/mutants/config.toml
	@$(BIN)/cosmic-ray init build/mutants/config.toml build/mutants/session.sqlite
	@$(BIN)/cosmic-ray exec build/mutants/config.toml build/mutants/session.sqlite
	@$(BIN)/cr-report build/mutants/session.sqlite | tail -n 3; git diff --stat

# Not in CI: minutes, and what is not installed is a row that says so. Ray: pip install ray.
.PHONY: kinds
kinds: setup
	@$(BIN)/python tests/support/table_of_kinds.py

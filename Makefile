# make test       install, lint, check types, run the tests
# make run        train the default preset; write samples, reconstructions and a report
# make format     fix lint and format the code
# make notebooks  run the notebooks in examples/ and store their outputs
# make faults     fault-injection, security and distributed tests in their long form (about 15 minutes)
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install -qq --disable-pip-version-check --no-compile
ifndef RUN
RUN := runs/digits-$(shell date +%Y%m%d-%H%M%S)
endif

.PHONY: test run format faults notebooks clean
.DELETE_ON_ERROR:

# Four pip processes in parallel install the pinned versions in groups of ten, with a line per group; a last call checks
# dependencies and adds any that are not pinned.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dualmcmc needs Python 3.11 or newer; try: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv .venv || { echo "no venv module: on Debian or Ubuntu, apt-get install python3-venv" >&2; exit 2; }
	@echo "installing $$(grep -cv '^#' constraints.txt) packages into .venv (1.7 GB on disk; PyTorch alone is a download of 190 MB); this takes one to three minutes"
	@grep -v '^#' constraints.txt | xargs -n 10 -P 4 sh -c \
	  '$(PIP) --no-deps "$$@" && echo "  installed $$# packages: $$(echo "$$@" | sed "s/==[^ ]*//g")"' sh
	@echo "  installing dualmcmc and checking its dependencies"
	@PIP_CONSTRAINT=constraints.txt $(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

# Bytecode is kept even if the environment says otherwise: the processes that tests start import PyTorch faster.
test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal

run: .venv/ready
	$(BIN)/dualmcmc train digits --device cpu --out $(RUN)
	@$(BIN)/dualmcmc sample $(RUN) --device cpu
	@$(BIN)/dualmcmc reconstruct $(RUN) --device cpu
	@$(BIN)/dualmcmc report $(RUN) --device cpu

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

faults: .venv/ready
	OMP_NUM_THREADS=1 DUALMCMC_FAULTS=long $(BIN)/pytest tests/faults tests/security tests/engine/test_distributed.py

notebooks: .venv/ready
	DUALMCMC_UPDATE_NOTEBOOKS=1 $(BIN)/pytest tests/test_notebooks.py -k runs

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache

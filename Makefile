# make run   train the default preset, write samples, curves and a report, say where they are
# make test  lint, type check and the whole test suite
# make faults  kills, damaged files, full disks, several processes and fuzz, many times over (about 15 minutes)
PYTHON ?= python3
BIN := .venv/bin
ifndef RUN
RUN := runs/digits-$(shell date +%Y%m%d-%H%M%S)
endif

.PHONY: run test faults format clean
.DELETE_ON_ERROR:

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dualmcmc needs Python 3.11 or newer; try: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv .venv || { echo "no venv module: on Debian or Ubuntu, apt-get install python3-venv" >&2; exit 2; }
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

run: .venv/ready
	$(BIN)/dualmcmc train digits --device cpu --out $(RUN)
	@$(BIN)/dualmcmc sample $(RUN) --device cpu
	@$(BIN)/dualmcmc reconstruct $(RUN) --device cpu
	@$(BIN)/dualmcmc report $(RUN) --device cpu

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

faults: .venv/ready
	OMP_NUM_THREADS=1 DUALMCMC_FAULTS=long $(BIN)/pytest tests/faults tests/security tests/engine/test_several.py

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache

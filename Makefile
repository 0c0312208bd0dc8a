# Two commands matter: `make demo` and `make test`. Both set up .venv first; neither needs anything installed
# beyond Python >= 3.11, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE  # else each process compiles the package and the tests again

.PHONY: help demo test check format bench bench-gpu docs lock parity-fuzz rehearse-cuda test-mutants test-faults test-cycles clean
help:
	@echo "make demo    train a small GPT on real text over 4 ranks, switch the layout half way, generate text"
	@echo "make test    set up .venv and run the tests"
	@echo "make check   formatting, lint, types, architecture"
	@echo "make format  rewrite the sources in the house format"
	@echo "make bench   tokens/s of one training step in several layouts, beside its peers"
	@echo "make bench-gpu  kernels, GPT-1.3B and peers on one H100 or H200, in less than 10 minutes; installs nothing"
	@echo "make docs    write what is made from the code: docs/config.md, tables, drawings"
	@echo "make lock    newest versions of all that is installed, written into constraints.txt"
	@echo "make parity-fuzz SECONDS=600 [SEED=0]  random layouts against one rank"
	@echo "make test-mutants [ONLY=cp2]  put each fault of a list into a copy, see that its test fails"
	@echo "make rehearse-cuda PYTHON=...  the program on GPUs that are not there; needs gcc and a CUDA build of torch"
	@echo "make test-faults N=100 [SEED=0]  kill training runs at N instants, restart them, compare to the bit"
	@echo "make test-cycles N=200 [SEED=0]  start and stop training runs by signals, see that nothing is left behind"
	@echo "make clean   remove .venv, runs/ and caches"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"megalite needs Python >= 3.11, $(PYTHON) is {v[0]}.{v[1]}: run make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch setuptools
	$(PIP) --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@# Byte code on every core, which pip writes on one; of the models that transformers has, each is compiled when it is used.
	$(BIN)/python -m compileall -qq -j 0 -x transformers/models $(VENV)/lib || true  # some are for newer Pythons
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/quickstart/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# `make check ALONE=` beside `make test`, which has the test of the architecture too.
ALONE ?= yes
check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(if $(ALONE),$(BIN)/python -m pytest tests/test_architecture.py)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.peers.run --models small

bench-gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu.run --fp8 \
		--json benchmarks/results/gpu.json --write-preferences benchmarks/results/gpu_preferences.yaml

docs: $(STAMP)
	$(BIN)/python docs/images/draw.py
	$(BIN)/python docs/tables/write.py

# The newest of everything that pyproject.toml allows. Run the tests before you commit what it writes.
lock: $(STAMP)
	$(PIP) --upgrade --upgrade-strategy eager torch setuptools
	$(PIP) --upgrade --upgrade-strategy eager --no-build-isolation --editable '.[dev]'
	$(BIN)/python tools/lock.py
	@touch $(STAMP)

rehearse-cuda: $(STAMP)
	$(BIN)/python -m tests.rehearsal.cuda.run --python $(PYTHON)

SECONDS ?= 600
SEED ?= 0
parity-fuzz: $(STAMP)
	$(BIN)/megalite parity --fuzz $(SECONDS) --seed $(SEED)

test-mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(ONLY)

N ?= 10
test-faults: $(STAMP)
	$(BIN)/python -m tests.faults $(N) --seed $(SEED)

test-cycles: $(STAMP)
	$(BIN)/python -m tests.faults.cycles $(N) --seed $(SEED)

clean:
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# On a fresh machine, `make demo` and `make test` set up all that they need in .venv.
# They need python3 (3.10 or later, with its venv module) and a C++ compiler.

PYTHON ?= python3

# Installed before the project, so that no other build of torch is pulled in. Override it to
# choose one, e.g. `make demo TORCH="torch==2.13.0 --index-url URL"` for a CUDA build.
TORCH ?= torch==2.13.0

# Models for the zoo. What timm needs beside torchvision comes with transformers; each torchvision
# fits one build of torch, and would bring that build along (benchmarks/zoo/timm_models.py).
TIMM := --no-deps 'timm>=1.0'

# Worker processes of the test run; each compiles C++ of its own. Each starts with a stretch of the
# files and steals at the end, so what the tests of a file share is mostly made once.
WORKERS ?= auto
PYTEST_ARGS ?=
# For `make test-share`.
MINUTES ?= 10
# `make bench BENCH_ARGS="run gpt"` runs one benchmark.
BENCH_ARGS ?= run

VENV := .venv
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal
DOCS := .venv-docs
EMULATED := .venv-emulated
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# By path: by setuptools' finder a script beside a clone called mpcompile would import the clone's folder.
EDITABLE := --config-settings editable_mode=compat --editable

# For `make gpu`: the longest that a call may take, in seconds; a folder with wheels of packages that
# python3 lacks; other arguments of `python3 -m benchmarks.gpu`.
SECONDS ?=
WHEELS ?=
GPU_ARGS ?=
# For `make emulated`: a GPU of `mpcompile/devices/gpus.py`.
GPU ?= h100
# For `make gpu-wheels`: the version of Python that the wheels are for.
GPU_PYTHON ?= 3.12

.PHONY: demo test test-all test-share test-torch test-inside sweep check docs bench bench-check gpu \
	gpu-wheels emulated dist dist-test clean FORCE

demo: $(VENV)/.stamp-run
	$(BIN)/mpcompile demo

# What tells whether the thing works: the lane that plain `pytest` runs.
test: $(VENV)/.stamp-test
	$(PYTEST) $(PYTEST_ARGS)

# All but the sweeps.
test-all: $(VENV)/.stamp-test
	$(PYTEST) -m 'not sweep and not gpu' $(PYTEST_ARGS)

# What takes longer: operators' tables, zoos, random programs. It writes tests/sweeps.md,
# and what was compiled wrongly, and cured, into tests/verify/cured.md.
sweep: $(VENV)/.stamp-test
	$(PYTEST) -m 'sweep and not gpu' --junitxml=build/sweep.xml $(PYTEST_ARGS); \
		status=$$?; $(BIN)/python tests/support/durations.py build/sweep.xml --sweeps --page tests/sweeps.md; \
		$(BIN)/python tests/support/verified_page.py build/sweep.xml --page tests/verify/cured.md || status=1; \
		exit $$status

# Of the slow lane what a change touches and a share of the rest, for so many minutes (tests/support/share.py).
test-share: $(VENV)/.stamp-test
	files=$$($(BIN)/python tests/support/share.py --minutes $(MINUTES)) && \
		{ [ -z "$$files" ] || $(PYTEST) -m 'slow and not sweep and not gpu' $$files $(PYTEST_ARGS); }

# The suite against another torch of the supported range, in an environment of its own:
# `make test-torch TORCH=2.12.0`. The registry's Linux builds are CUDA builds, some gigabytes each.
test-torch:
	@$(if $(filter command line environment,$(origin TORCH)),:,echo 'say which: make test-torch TORCH=2.12.0'; exit 2)
	$(MAKE) test VENV=.venv-torch-$(TORCH) TORCH=torch==$(TORCH)

# The tests that touch the insides of torch (marked inside), against another one. Of each, a third of the rows.
test-inside:
	$(MAKE) test-torch PYTEST_ARGS="--every 3 -m 'inside and not slow and not sweep and not gpu' $(PYTEST_ARGS)"

check: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site of the documents, in build/site. What it needs is small and goes to an environment of its own.
# With --quiet, --strict would see no warning.
docs: $(DOCS)/.stamp-docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo 'open build/site/index.html'

bench: $(VENV)/.stamp-dev
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# What is fast to measure once more, as ratios against the committed ones; fails if one fell beyond noise.
# For an idle machine like one that results are committed of.
bench-check: $(VENV)/.stamp-dev
	$(BIN)/python -m benchmarks check

# `make gpu OUT=results` runs everything that needs a CUDA device, in pieces of at most 8 minutes. It
# uses the packages that python3 has: it makes no environment and downloads nothing. A second call
# goes on where the first one stopped.
gpu:
	@$(if $(OUT),:,echo 'say where results go: make gpu OUT=results'; exit 2)
	$(PYTHON) -m benchmarks.gpu --out $(OUT) $(if $(SECONDS),--seconds $(SECONDS)) \
		$(if $(WHEELS),--wheels $(WHEELS)) $(GPU_ARGS)

# `make gpu-wheels WHEELS=wheels`, where there is a network, downloads what `make gpu` needs beside torch
# and numpy: packages of pure Python, some 3 MB.
gpu-wheels:
	@$(if $(WHEELS),:,echo 'say where they go: make gpu-wheels WHEELS=wheels'; exit 2)
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
		--python-version $(GPU_PYTHON) --implementation py --abi none --platform any \
		--dest $(WHEELS) platformdirs rich markdown-it-py mdurl pygments \
		pytest pluggy iniconfig packaging pytest-timeout pytest-xdist execnet \
		hypothesis sortedcontainers expecttest

# The tests marked gpu on a GPU that is emulated on the host (benchmarks/emucuda), but for what it can't
# show: some minutes. `make emulated GPU=t4` runs on another GPU what depends on the kind of GPU.
emulated: $(EMULATED)/.stamp-emulated
	OMP_NUM_THREADS=1 $(EMULATED)/bin/python -m benchmarks.emucuda $(GPU) -m pytest -q -rs \
		-m '$(if $(filter h100,$(GPU)),gpu,gpu and by_gpu)' --numprocesses 2 --dist worksteal \
		$(PYTEST_ARGS) $$(grep -rl --include='test_*.py' 'mark\.gpu' tests)

# What a release uploads: the sdist, and the wheel that is built from it.
dist: $(VENV)/.stamp-dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*

# Installs that wheel in an environment of its own, away from the checkout, with the torch of $(VENV) after it.
dist-test: dist
	WHEEL=$$(realpath dist/*.whl) $(BIN)/python -m pytest -m "sweep or not sweep" tests/house/test_dist.py

clean:
	rm -rf .venv .venv-docs .venv-emulated .venv-torch-* build dist *.egg-info

# Stamps: one file for each thing installed, so that the next run does not install it again.

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or later is needed" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)

# Written again only when TORCH changes; it is then newer than the stamps below.
$(VENV)/.stamp-torch: $(BIN)/python FORCE
	@if [ "$$(cat $@ 2>/dev/null)" != '$(TORCH)' ]; then \
		echo 'installing $(TORCH)'; \
		$(PIP) $(TORCH) && echo '$(TORCH)' > $@; \
	fi

$(VENV)/.stamp-run: $(VENV)/.stamp-torch pyproject.toml
	$(PIP) $(EDITABLE) .
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-torch pyproject.toml
	$(PIP) $(EDITABLE) '.[test]'
	$(PIP) $(TIMM)
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-torch pyproject.toml
	$(PIP) $(EDITABLE) '.[dev]'
	$(PIP) $(TIMM)
	@touch $@

# Triton's version is the one that torch's CUDA builds pin; a CPU build of torch has none.
$(EMULATED)/.stamp-emulated: pyproject.toml
	$(PYTHON) -m venv $(EMULATED)
	$(EMULATED)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(EMULATED)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps triton==3.7.1
	$(EMULATED)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 $(EDITABLE) '.[test]'
	@touch $@

# The extra `docs` without the project, which would bring torch. pip brings a reader of TOML for Python 3.10.
$(DOCS)/.stamp-docs: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c "$$DOCS_EXTRA" > $(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r $(DOCS)/requirements.txt
	@touch $@

define DOCS_EXTRA
import sys
if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["docs"], sep="\n")
endef
export DOCS_EXTRA

# One front door. Every recipe makes its own set-up; nothing but Python 3.11+ and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs
BUILD_STAMP := $(VENV)/.build
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed
FUZZ_STAMP := $(VENV)/.fuzz
AUDIT_STAMP := $(VENV)/.audit
CLUSTERS := .venv-clusters
CLUSTERS_STAMP := $(CLUSTERS)/.installed
SPARK := .venv-spark
SPARK_STAMP := $(SPARK)/.installed
TRAINERS := .venv-trainers
TRAINERS_STAMP := $(TRAINERS)/.installed
TRAINERS_PACKAGES = $(addprefix src/penstock/,accelerate huggingface jax keras lightning tensorflow)
OLDEST := .venv-oldest
OLDEST_STAMP := $(OLDEST)/.installed
OLDEST_TESTS = wire graph passes control dispatcher security/test_decoders.py
OLDEST_IGNORED = --ignore=tests/wire/test_leaf_types.py  # needs torch
EXPERIMENTS_STAMP := $(VENV)/.experiments
EXPERIMENTS = caching caching_jobs caching_timeline coordinated dsi epochs fleet offloading routing scaling sharing stalls visitation
BENCHES = $(patsubst benchmarks/bench_%.py,%,$(sort $(wildcard benchmarks/bench_*.py)))

# Services start processes: without byte code on disk each of them would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest crossbar simulate walks mutants fuzz strangers encryption rotation check audit bench experiment
.PHONY: reference docs dist clean test-clusters test-trainers test-warehouse torchrec

help:  ## list the recipes
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[dev]"
	touch $@

setup: $(STAMP)  ## make the virtual environment with everything that tests need

demo: $(STAMP)  ## show what Penstock does, in under a minute
	$(BIN)/penstock demo

test: $(STAMP)  ## run the tests, or those of some packages: make test P="graph passes" [ARGS="-x -k filter"]
	$(BIN)/python -m tests $(foreach package,$(P),$(wildcard tests/$(package)) src/penstock/$(package)) $(ARGS)

# Ray and Kubernetes' client in an environment of their own; Slurm is Debian's, and is installed if this is root's.
$(CLUSTERS_STAMP): pyproject.toml
	command -v slurmctld >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge; }
	$(PYTHON) -m venv $(CLUSTERS)
	$(CLUSTERS)/bin/python -m pip install -q --disable-pip-version-check "torch==2.13.0"
	$(CLUSTERS)/bin/python -m pip install -q --disable-pip-version-check -e ".[clusters]"
	touch $@

test-clusters: $(CLUSTERS_STAMP)  ## run the tests on a Slurm of three nodes, on three raylets, and on an API server like Kubernetes'
	$(CLUSTERS)/bin/python -m pytest tests/clusters -n 0 $(ARGS)

# torch first and exactly: what comes after it must not bring another one. Two processes, each with modules of its own:
# most tests wait for one program. What fails is judged by a second run alone, as in `make test`: the first names it.
$(TRAINERS_STAMP): pyproject.toml
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install -q --disable-pip-version-check "torch==2.13.0"
	$(TRAINERS)/bin/python -m pip install -q --disable-pip-version-check -e ".[trainers]"
	touch $@

test-trainers: $(TRAINERS_STAMP)  ## run the tests with Keras, JAX, TensorFlow, Lightning, Accelerate and Hugging Face
	KERAS_BACKEND=torch $(TRAINERS)/bin/python -m pytest tests/trainers $(TRAINERS_PACKAGES) -n 2 --dist loadscope $(ARGS) || \
		KERAS_BACKEND=torch $(TRAINERS)/bin/python -m pytest tests/trainers $(TRAINERS_PACKAGES) -n 0 --last-failed --last-failed-no-failures none $(ARGS)

# Spark runs on a Java of Debian's, which is installed if this is root's.
$(SPARK_STAMP): pyproject.toml
	command -v java >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq default-jre-headless; }
	$(PYTHON) -m venv $(SPARK)
	$(SPARK)/bin/python -m pip install -q --disable-pip-version-check "torch==2.13.0"
	$(SPARK)/bin/python -m pip install -q --disable-pip-version-check -e ".[dev,spark,experiments]"
	touch $@

test-warehouse: $(SPARK_STAMP)  ## run the tests of feature tables, and those on Spark and Polars
	$(SPARK)/bin/python -m pytest tests/warehouse tests/spark -n 0 $(ARGS)

crossbar: $(STAMP)  ## run random cases of pipelines, modes and happenings: make crossbar SEEDS=0-99 [ARGS="--jobs 2"]
	$(BIN)/python -m tests.crossbar $(or $(SEEDS),0-99) $(ARGS)

simulate: $(STAMP)  ## run seeded cases of the protocol without processes: make simulate SEEDS=0-999 [ARGS="--jobs 2"]
	$(BIN)/python -m penstock.testing.simulator $(or $(SEEDS),0-999) $(ARGS)

walks: $(STAMP)  ## trace four events over all processes: which modules each enters, in order
	$(BIN)/python -m tests.walks

mutants: $(STAMP)  ## break the stream protocol in 60 seeded ways, and see that its tests notice: make mutants [SEEDS=0-1] [ARGS="--cases 2000"]
	$(BIN)/python tools/mutants.py $(or $(SEEDS),0) $(ARGS)

$(FUZZ_STAMP): $(STAMP)
	-$(BIN)/python -m pip install -q --disable-pip-version-check atheris
	touch $@

fuzz: $(FUZZ_STAMP)  ## hostile messages against decoders, a dispatcher and a runner: make fuzz [ARGS="dispatcher --messages 1000000"]
	$(BIN)/python tools/fuzz.py $(ARGS)

strangers: $(STAMP)  ## two thousand connections with garbage at each door of a working service: make strangers [ARGS=--quick]
	$(BIN)/python experiments/strangers.py $(ARGS)

encryption: $(STAMP)  ## what encrypted TCP costs beside the sockets and the shared memory of one host
	$(BIN)/python experiments/encryption.py $(ARGS)

rotation: $(STAMP)  ## rotate all keys of a service whose processes are killed fifty times: make rotation [ARGS="--kills 10"]
	$(BIN)/python -m tests.security.rotation $(ARGS)

# What needs no extra, and reaches every direct dependency: sockets, arrays, tables, pickles, files.
$(OLDEST_STAMP): pyproject.toml tools/oldest.py
	$(PYTHON) -m venv $(OLDEST)
	$(PYTHON) tools/oldest.py > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install -q --disable-pip-version-check -c $(OLDEST)/constraints.txt -e . pytest pytest-timeout "hypothesis>=6.100"
	touch $@

test-oldest: $(OLDEST_STAMP)  ## run part of the tests with the oldest dependencies that pyproject.toml allows
	$(OLDEST)/bin/python -m pytest $(foreach package,$(or $(P),$(OLDEST_TESTS)),tests/$(package)) $(OLDEST_IGNORED) $(ARGS)

$(AUDIT_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check pip-audit
	touch $@

audit: $(AUDIT_STAMP)  ## look up what is installed among known vulnerabilities, where that database can be reached
	$(BIN)/python tools/audit.py

check: $(STAMP)  ## formatting, lint, types, imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(PEERS_STAMP): benchmarks/requirements-peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q --disable-pip-version-check "torch==2.13.0"
	$(PEERS)/bin/python -m pip install -q --disable-pip-version-check -r benchmarks/requirements-peers.txt
	touch $@

torchrec: $(STAMP)  ## install torchrec and what it needs: releases that load on torch 2.13, without changing that
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 \
		torchmetrics==1.0.3 tensordict pyre-extensions pyvers typing-inspect mypy-extensions lightning-utilities iopath \
		portalocker orjson importlib-metadata zipp

# Peers are made where there are some to compare with: `protocol` has none, nor has another checkout of ours. Those of
# `features`, `session` and `transforms` are libraries, in this environment.
bench: $(STAMP) $(if $(filter session transforms,$(B)),$(EXPERIMENTS_STAMP)) $(if $(findstring --against,$(ARGS))$(filter features protocol session transforms,$(B)),,$(PEERS_STAMP))  ## measure against the peers: make bench B=trivial [ARGS=--quick], or ARGS="--against CHECKOUT"
	@test -f benchmarks/bench_$(subst -,_,$(B)).py || { echo "say which: make bench B=name, one of: $(BENCHES)"; exit 2; }
	$(BIN)/python benchmarks/bench_$(subst -,_,$(B)).py $(ARGS)

$(EXPERIMENTS_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[experiments]"
	touch $@

experiment: $(EXPERIMENTS_STAMP) $(if $(filter caching caching_jobs caching_timeline dsi fleet offloading routing scaling stalls visitation,$(E)),,$(PEERS_STAMP))  ## repeat an experiment of the paper: make experiment E=coordinated [ARGS=--quick]
	@test -n "$(filter $(E),$(EXPERIMENTS))" || { echo "say which: make experiment E=name, one of: $(EXPERIMENTS)"; exit 2; }
	$(BIN)/python experiments/$(E).py $(ARGS)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[docs]"
	touch $@

reference: $(STAMP)  ## write docs/reference.md from signatures and docstrings
	$(BIN)/python tools/reference.py

docs: $(DOCS_STAMP) reference  ## build the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

$(BUILD_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check build
	touch $@

dist: $(BUILD_STAMP)  ## build sdist and wheel in dist/, and see that the wheel alone runs the demo
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install -q --disable-pip-version-check dist/*.whl
	cd build && PYTHONPATH= empty/bin/penstock demo
	@ls dist/*

clean:
	rm -rf $(VENV) $(PEERS) $(OLDEST) $(TRAINERS) $(CLUSTERS) $(SPARK) build dist site

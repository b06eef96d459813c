# Everything a developer does; each target installs what it needs into .venv, and no more. Needs Python 3.11+ and make,
# but not root. PYTHON=... chooses the interpreter.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
UV := $(or $(shell command -v uv),$(BIN)/uv)
# Where Java 17 or newer is installed, Spark needs none of its own.
JAVA := $(shell java -version 2>&1 | sed -nE 's/.* version "([0-9]+).*/\1/p')
EXCLUDES := $(if $(filter-out 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16,$(JAVA)),--excludes locks/java.txt)
# The set dev has all of the others, so once it is installed nothing else is.
EVERYTHING := $(VENV)/set-dev
is_whole := $(shell test $(EVERYTHING) -nt locks/dev.txt -a $(EVERYTHING) -nt pyproject.toml 2>/dev/null && echo yes)
SERVER := $(if $(is_whole),$(EVERYTHING),$(VENV)/set-server)
DEMO := $(if $(is_whole),$(EVERYTHING),$(VENV)/set-demo)
CHECK := $(if $(is_whole),$(EVERYTHING),$(VENV)/set-check)
SEEDS ?= 1000
MINUTES ?= 480
# One more than cores: live tests wait for their nodes, for Java and for clocks.
WORKERS ?= 3
PYTEST := $(PY) -m pytest
# What is compiled is shared by all workers and nodes, and kept for the next run: it takes two thirds of a collection.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/compiled
# The first three are each run by one worker (tests/conftest.py), so they begin; files of a few seconds make the ends even.
# One pytest call, so there is one closing line and one exit code.
SUITES := tests/cluster tests/spark tests/kafka tests/chaos tests/deploy tests/sim tests/unit
STUBS := smq_pb2.py smq_pb2.pyi smq_pb2_grpc.py smq_pb2_grpc.pyi

.PHONY: help install setup package sbom release demo pipeline test test-full test-release quick check lint types imports proto proto-check docs site sim chaos bench bench-nightly lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(SERVER) ## Make .venv for `smq`: the server, the command line and the clients

setup: $(EVERYTHING) ## Make .venv for developers: everything, Spark and all test clients included

$(PY):
	@test -n "$(PYTHON)" || { echo "smq needs Python 3.11 or newer; none was found. Set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "smq needs Python 3.11 or newer; $(PYTHON) is older. Set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "making $(VENV)"
	@if command -v uv >/dev/null 2>&1; then uv venv --quiet --python "$(PYTHON)" $(VENV); \
	else \
		"$(PYTHON)" -m venv $(VENV) && \
		$(PY) -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r locks/uv.txt; fi

# The jars of Spark are not compressed once more on their way into .venv: that took half of its installation.
$(VENV)/set-%: locks/%.txt pyproject.toml | $(PY)
	@echo "installing locks/$*.txt into $(VENV)"
	@$(UV) pip install --python $(PY) --require-hashes --no-deps $(if $(filter demo,$*),$(EXCLUDES)) \
		--config-settings-package 'pyspark:--build-option=--compression=stored' -r $<
	@$(UV) pip install --quiet --python $(PY) --no-deps --no-build-isolation --editable .
	@touch $@

package: $(CHECK) ## Build the wheel and the source archive into dist
	$(PY) -m hatchling build -d dist

sbom: $(EVERYTHING) ## Write what a server is made of into dist, as CycloneDX
	@mkdir -p dist
	$(PY) -W ignore -m cyclonedx_py requirements locks/server.txt --pyproject pyproject.toml --mc-type application \
		--output-reproducible -o dist/smq-sbom.cdx.json

release: sbom ## Check, build and tag the version that is committed; it pushes nothing
	$(PY) docs/release.py

demo: $(DEMO) ## Publish real flights to three nodes, kill a leader midway, read everything back with Spark
	$(PY) -m chaos_tests.demo

pipeline: $(DEMO) ## Stream flights through Spark into Parquet, kill it midway, check the result with pandas
	$(PY) -m examples.pipeline

test: $(EVERYTHING) ## Run unit, simulation, live cluster, Kafka and Spark tests, with WORKERS at a time
	$(PYTEST) --numprocesses $(WORKERS) --no-loadscope-reorder $(SUITES)

test-full: $(EVERYTHING) ## Run all tests, long ones included
	$(PYTEST) -m "" $(SUITES)

test-release: $(EVERYTHING) ## Run all tests as root, with every program that they need: a skip is a failure
	TESTS_SKIP_NOTHING=1 $(PYTEST) -m "" $(SUITES)

quick: check ## Check, and run the unit tests of the rooms that differ from main
	$(PYTEST) --numprocesses $(WORKERS) $$($(PY) -m tests.changed)

check: lint types imports proto-check ## Check lint, format, wording, types, layers and generated stubs

lint: $(CHECK)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PY) docs/check_words.py

types: $(CHECK)
	$(BIN)/mypy --strict

imports: $(CHECK)
	$(BIN)/lint-imports

proto: $(CHECK) ## Generate the gRPC stubs from the .proto file
	$(call generate_stubs,.)

proto-check: $(CHECK) ## Fail if `make proto` would change something
	@rm -rf $(VENV)/proto-check && mkdir -p $(VENV)/proto-check
	@$(call generate_stubs,$(VENV)/proto-check)
	@for stub in $(STUBS); do \
		diff -q smq/clients/pb/$$stub $(VENV)/proto-check/smq/clients/pb/$$stub >/dev/null || \
		{ echo "smq/clients/pb/$$stub does not match the .proto file: run 'make proto' and commit it" >&2; exit 1; }; \
	done
	@echo "gRPC stubs are current"

# The virtual path makes the generated imports absolute: `from smq.clients.pb import ...`.
define generate_stubs
$(PY) -m grpc_tools.protoc -Ismq/clients/pb=smq/clients/proto/smq/v1 \
	--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) smq/clients/pb/smq.proto
endef

docs: $(EVERYTHING) ## Generate the pages that come from code
	$(PY) -m docs.generate
	$(PY) -m chaos_tests ledger

site: $(EVERYTHING) ## Build the documentation as a site in build/site
	$(PY) -m sphinx -q -W --keep-going -c docs/site . build/site

sim: $(CHECK) ## Simulate whole clusters under SEEDS seeds
	$(PY) -m chaos_tests sim --seeds $(SEEDS)

chaos: $(EVERYTHING) ## Run live histories with reports for MINUTES; resumes if stopped
	$(PY) -m chaos_tests run --minutes $(MINUTES) --out chaos-runs

bench: $(EVERYTHING) ## Measure this machine: rates, latencies, failover, recovery; then beside Kafka, etcd and NATS
	$(PY) -m benchmarks
	$(PY) -m benchmarks peers

bench-nightly: $(EVERYTHING) ## Measure the main figures, and show how they have changed since earlier nights
	$(PY) -m benchmarks --only latency --only offsets --only kafka --only failover --only recovery --only commands
	$(PY) -m benchmarks trend

LOCK = uv pip compile --universal --generate-hashes --no-annotate --quiet --python-version 3.11 --no-emit-index-url \
	--custom-compile-command "make lock" --output-file
PROJECT := pyproject.toml --group pyproject.toml:install

lock: ## Pin versions and hashes again (needs uv)
	$(LOCK) locks/dev.txt $(PROJECT) --all-extras
	for set in check demo server; do $(LOCK) locks/$$set.txt $(PROJECT) --extra $$set --constraints locks/dev.txt; done
	echo uv | $(LOCK) locks/uv.txt -

clean: ## Remove build products; keep data directories
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build

# Everything a developer does; each target brings its own set-up. Needs Python 3.11+ and make, but not root. Uses uv if it
# is installed, otherwise `python -m venv` and pip. PYTHON=... chooses the interpreter.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.setup-stamp
SEEDS ?= 1000
MINUTES ?= 480
WORKERS ?= 2
PYTEST := $(PY) -m pytest
# The first three are each run by one worker (tests/conftest.py), so they begin; files of a few seconds make the ends even.
# One pytest call, so there is one closing line and one exit code.
SUITES := tests/cluster tests/spark tests/kafka tests/chaos tests/deploy tests/sim tests/unit
STUBS := smq_pb2.py smq_pb2.pyi smq_pb2_grpc.py smq_pb2_grpc.pyi

.PHONY: help setup package release demo pipeline test test-full test-release check lint types imports proto proto-check docs site sim chaos bench bench-nightly lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP) ## Make .venv with everything pinned by requirements.lock

$(STAMP): pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "smq needs Python 3.11 or newer; none was found. Set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@if command -v uv >/dev/null 2>&1; then \
		{ test -x $(PY) || uv venv --quiet --python "$(PYTHON)" $(VENV); } && \
		uv pip sync --quiet --python $(PY) --require-hashes requirements.lock && \
		uv pip install --quiet --python $(PY) --no-deps --no-build-isolation --editable . ; \
	else \
		{ test -x $(PY) || "$(PYTHON)" -m venv $(VENV); } && \
		{ $(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null; } && \
		$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock && \
		$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . ; \
	fi
	@touch $@

package: $(STAMP) ## Build the wheel and the source archive into dist
	$(PY) -m hatchling build -d dist

release: $(STAMP) ## Check, build and tag the version that is committed; it pushes nothing
	$(PY) docs/release.py

demo: $(STAMP) ## Publish real flights to three nodes, kill a leader midway, read everything back with Spark
	$(PY) -m chaos_tests.demo

pipeline: $(STAMP) ## Stream flights through Spark into Parquet, kill it midway, check the result with pandas
	$(PY) -m examples.pipeline

test: $(STAMP) ## Run unit, simulation, live cluster, Kafka and Spark tests, with WORKERS at a time
	$(PYTEST) --numprocesses $(WORKERS) --no-loadscope-reorder $(SUITES)

test-full: $(STAMP) ## Run all tests, long ones included
	$(PYTEST) -m "" $(SUITES)

test-release: $(STAMP) ## Run all tests as root, with every program that they need: a skip is a failure
	TESTS_SKIP_NOTHING=1 $(PYTEST) -m "" $(SUITES)

check: lint types imports proto-check ## Check lint, format, wording, types, layers and generated stubs

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PY) docs/check_words.py

types: $(STAMP)
	$(BIN)/mypy --strict

imports: $(STAMP)
	$(BIN)/lint-imports

proto: $(STAMP) ## Generate the gRPC stubs from the .proto file
	$(call generate_stubs,.)

proto-check: $(STAMP) ## Fail if `make proto` would change something
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

docs: $(STAMP) ## Generate the pages that come from code
	$(PY) -m docs.generate
	$(PY) -m chaos_tests ledger

site: $(STAMP) ## Build the documentation as a site in build/site
	$(PY) -m sphinx -q -W --keep-going -c docs/site . build/site

sim: $(STAMP) ## Simulate whole clusters under SEEDS seeds
	$(PY) -m chaos_tests sim --seeds $(SEEDS)

chaos: $(STAMP) ## Run live histories with reports for MINUTES; resumes if stopped
	$(PY) -m chaos_tests run --minutes $(MINUTES) --out chaos-runs

bench: $(STAMP) ## Measure this machine: rates, latencies, failover, recovery; then beside Kafka, etcd and NATS
	$(PY) -m benchmarks
	$(PY) -m benchmarks peers

bench-nightly: $(STAMP) ## Measure the main figures, and show how they have changed since earlier nights
	$(PY) -m benchmarks --only latency --only offsets --only kafka --only failover --only recovery --only commands
	$(PY) -m benchmarks trend

lock: ## Pin versions and hashes again (needs uv)
	uv pip compile pyproject.toml --all-extras --universal --generate-hashes --no-annotate --quiet \
		--python-version 3.11 --no-emit-index-url --custom-compile-command "make lock" --output-file requirements.lock

clean: ## Remove build products; keep data directories
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build

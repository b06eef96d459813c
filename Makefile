# Everything a developer does, each target with the set-up it needs. Python 3.11+ and make are enough; root is not
# needed. uv is used where it is installed, `python -m venv` and pip otherwise. PYTHON=... chooses the interpreter.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.setup-stamp
SEEDS ?= 1000
MINUTES ?= 480
PYTEST := $(PY) -m pytest
# Suites in the order in which they are cheapest to fail; one pytest call, so one closing line and one exit code.
SUITES := tests/unit tests/sim tests/cluster tests/kafka tests/spark tests/chaos
STUBS := smq_pb2.py smq_pb2.pyi smq_pb2_grpc.py smq_pb2_grpc.pyi

.PHONY: help setup demo pipeline test test-full check lint types imports proto proto-check docs sim chaos bench lock clean

help: ## Lists the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP) ## Makes .venv with everything pinned by requirements.lock

$(STAMP): pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "smq needs Python 3.11 or newer: none found; say PYTHON=/path/to/python3.11" >&2; exit 1; }
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

demo: $(STAMP) ## Publishes real flights to three nodes, kills a leader on the way, reads all back by Spark
	$(PY) -m chaos_tests.demo

pipeline: $(STAMP) ## Flights through Spark Structured Streaming into Parquet, killed on the way, checked by pandas
	$(PY) -m examples.pipeline

test: $(STAMP) ## Unit, simulation, live cluster and Spark tests
	$(PYTEST) $(SUITES)

test-full: $(STAMP) ## As test, with the long ones
	$(PYTEST) -m "" $(SUITES)

check: lint types imports proto-check ## Lint, format, types, layers, generated files

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy --strict

imports: $(STAMP)
	$(BIN)/lint-imports

proto: $(STAMP) ## Generates the gRPC stubs from the .proto file
	$(call generate_stubs,.)

proto-check: $(STAMP) ## Fails where `make proto` would change something
	@rm -rf $(VENV)/proto-check && mkdir -p $(VENV)/proto-check
	@$(call generate_stubs,$(VENV)/proto-check)
	@for stub in $(STUBS); do \
		diff -q smq/clients/pb/$$stub $(VENV)/proto-check/smq/clients/pb/$$stub >/dev/null || \
		{ echo "smq/clients/pb/$$stub is not what the .proto file gives: run 'make proto' and commit it" >&2; exit 1; }; \
	done
	@echo "gRPC stubs are current"

# The virtual path makes the generated imports absolute: `from smq.clients.pb import ...`, beside our package smq.
define generate_stubs
$(PY) -m grpc_tools.protoc -Ismq/clients/pb=smq/clients/proto/smq/v1 \
	--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) smq/clients/pb/smq.proto
endef

docs: $(STAMP) ## Generates the pages that come from code
	$(PY) docs/generate_errors.py
	$(PY) docs/generate_kafka.py
	$(PY) -m chaos_tests ledger

sim: $(STAMP) ## Simulates whole clusters under SEEDS seeds
	$(PY) -m chaos_tests sim --seeds $(SEEDS)

chaos: $(STAMP) ## Live histories with reports until MINUTES are over; goes on where it was stopped
	$(PY) -m chaos_tests run --minutes $(MINUTES) --out chaos-runs

bench: $(STAMP) ## Measures rates, latencies, failover and recovery on this machine
	$(PY) -m benchmarks

lock: ## Pins versions and hashes anew (needs uv)
	uv pip compile pyproject.toml --all-extras --universal --generate-hashes --no-annotate --quiet \
		--python-version 3.11 --no-emit-index-url --custom-compile-command "make lock" --output-file requirements.lock

clean: ## Removes what the build made; data directories stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build

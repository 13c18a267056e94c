# Every target sets up what it needs. Required: git, make and Python 3.11 or later.
# make test PYTHON=python3.13 uses that one; when its version changes, the environment is made again.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LIB    := $(VENV)/lib/python$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
CORE   := $(LIB)/.core
TEST   := $(LIB)/.test
SITE    = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Most of the time tests wait for the disk, to survive a power cut; kill -9 they survive in memory, too.
MEMORY  = $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 8000000 { print "/dev/shm" }')
# Tests start hundreds of processes: without cached bytecode, each of them compiles onceward.
CACHED := env -u PYTHONDONTWRITEBYTECODE
BY_FILE = $(CACHED) $(BIN)/python -m pytest -p tests.support.whole_files --dist loadscope --no-loadscope-reorder -o console_output_style=classic

.DEFAULT_GOAL := help
.PHONY: help demo test browser lint bench bench-peers soak simulate campaign conformance reference proto hashes faces docs format clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null || grep '##' $(MAKEFILE_LIST)

demo: $(CORE) ## Produce, consume, crash and balance thousands of orders (under a minute)
	@$(BIN)/onceward demo

test: $(TEST) browser ## Run every test
	@files=$$(mktemp -d "$${TMPDIR:-$(or $(MEMORY),/tmp)}/onceward-XXXXXX") && trap 'rm -rf "$$files"' EXIT && \
	trap 'exit 130' INT TERM && TMPDIR=$$files $(BY_FILE) -n 8 $(PYTEST)

# The tests of the console drive an installed Chromium or Chrome, or the one that ONCEWARD_TEST_BROWSER names.
browser:
	@for name in "$$ONCEWARD_TEST_BROWSER" chromium chromium-browser google-chrome google-chrome-stable chrome; do \
	test -n "$$name" && command -v "$$name" > /dev/null && exit 0; done; \
	install='apt-get update && apt-get install --yes --no-install-recommends chromium'; \
	if command -v apt-get > /dev/null && { test "$$(id -u)" = 0 || sudo -n true 2> /dev/null; }; then \
	echo "Installing chromium …"; if test "$$(id -u)" = 0; then sh -c "$$install"; else sudo -n sh -c "$$install"; fi > /dev/null 2>&1 && \
	command -v chromium > /dev/null && exit 0; fi; \
	echo "The tests of the console need Chromium or Chrome. Run: sudo sh -c '$$install'" >&2; exit 1

lint: $(TEST) ## Check style, types, import directions, generated files and docs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache | tail -n 3
	@$(BIN)/python spec/conformance.py --check
	@$(BIN)/python spec/cli_reference.py --check
	@$(BIN)/python proto/generate.py --check
	@$(BIN)/python tools/faces.py --check
	@$(SITE) --site-dir $(VENV)/site > $(VENV)/site.log 2>&1 || { cat $(VENV)/site.log; exit 1; }

bench: $(TEST) ## Measure against bare loops in the same run, and print ratios
	@$(BIN)/python -m bench

bench-peers: $(TEST) ## Measure other task queues beside onceward, in an environment of their own (PEERS="celery taskiq")
	@test -x $(VENV)/peers/bin/python || $(PYTHON) -m venv $(VENV)/peers
	@$(VENV)/peers/bin/python -m pip --disable-pip-version-check --quiet install --requirement bench/peers/requirements.txt
	@$(BIN)/python -m bench.peers.table $(VENV)/peers/bin/python $(PEERS)
	@$(if $(PEERS),,$(BIN)/python -m bench.peers.postgresql --python $(VENV)/peers/bin/python)

soak: $(TEST) ## Run the long tests, draw new examples, then abuse the engine at random for 20 minutes (MINUTES=20)
	@$(BY_FILE) -n 4 -m 'long or hypothesis' --hypothesis-profile explore
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),20)

simulate: $(TEST) ## Run the real code on simulated time, wires and crashes (SEEDS=1000 SEED=0, or PLANTED=1)
	@$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),1000) --seed $(or $(SEED),0) $(if $(PLANTED),--planted)

campaign: $(TEST) ## Kill and pause workers and restart servers while thousands of orders run (OPTIONS=--help)
	@$(BIN)/python -m tests.campaign $(OPTIONS)

conformance: $(TEST) ## Regenerate docs/reference/conformance.md
	@$(BIN)/python spec/conformance.py

reference: $(TEST) ## Regenerate docs/reference/cli.md from the commands
	@$(BIN)/python spec/cli_reference.py

proto: $(TEST) ## Regenerate src/onceward/boundary/v1 from boundary.proto
	@$(BIN)/python proto/generate.py

hashes: $(TEST) ## Regenerate constraints.hashed.txt for this machine and Python
	@$(BIN)/python tools/hashes.py

faces: $(TEST) ## Regenerate the blocking public classes from the asyncio ones
	@$(BIN)/python tools/faces.py

docs: $(TEST) ## Build the documentation into site/
	@$(SITE)

format: $(TEST) ## Fix and format the code
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

clean: ## Remove everything that make created
	rm -rf $(VENV) dist build site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# hatchling and editables build the package here; pip's isolated environment would be unpinned.
$(CORE): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) …"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "onceward needs Python 3.11 or later; run make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -m venv $(if $(wildcard $(LIB)),,--clear) $(VENV)
	@$(PIP) install --constraint constraints.txt hatchling editables
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[boundary]'
	@touch $@

$(TEST): $(CORE)
	@echo "Installing test dependencies …"
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[test]'
	@touch $@

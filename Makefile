# Every target makes the environment that it needs by itself; when that is done it costs nothing.
#   make demo ARGS="--peers 3 --no-kill"      make test PYTEST_ARGS="tests/flat -x"      make PYTHON=/path/to/python3.12

VENV := .venv
BENCH_VENV := .venv-hivemind
ZOO_VENV := .venv-optimizers
TORCHFT_VENV := .venv-torchft
ARGS ?=
PYTEST_ARGS ?= -q

# Every process that is started would compile Shoal anew, and pytest all tests: a minute in all.
unexport PYTHONDONTWRITEBYTECODE

# The first of these that is Python 3.11 or newer; asked for only when an environment is made.
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)

# Twice quiet: no advice about indexes, errors only.
PIP_INSTALL := -m pip install --quiet --quiet --disable-pip-version-check
# "torch==X", exactly as the constraints say. It is installed on its own and first: a looser requirement, such as that
# of a package that depends on it, may fetch gigabytes of another build.
TORCH := $(shell grep '^torch==' constraints.txt)

# What mypy checks, as far as it exists.
TYPED := shoal tests $(wildcard examples benchmarks)

.DEFAULT_GOAL := help
.PHONY: help demo albert diloco test test-all test-long test-more test-capabilities sweep sweep-tests soak attacks lint docs bench bench-optimizer bench-outer bench-contiguous goodput optimizers clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train a small GPT with several peers on this machine; kills one, takes in another (ARGS=...)"
	@echo "make test    run the tests; some 7 minutes on 2 cores (PYTEST_ARGS=...)"
	@echo "make test-all            run the long ones too, and the numeric ones as on older processors"
	@echo "make test-long           run only the long ones (PYTEST_ARGS=...)"
	@echo "make test-more           run only the other cases of tests of which test and test-long run few"
	@echo "make test-capabilities   run the numeric tests as on older processors (PYTEST_ARGS=...)"
	@echo "make sweep   run 10,000 simulated swarms with faults; goes on where it was stopped (SEEDS=10000 ARGS=...)"
	@echo "make sweep-tests         run the tests of the simulator with 60 times as many seeds (SOAK=60 PYTEST_ARGS=...)"
	@echo "make soak    train with real processes that are killed, 5 times (TIMES=5); cut off 2,000 peers (CUTS=2000);"
	@echo "             then kill, stop and start trainers in three modes (CHAOS_MINUTES=10 each, CHAOS_SEED=1)"
	@echo "make attacks each attack of one liar on four trainers, then all in turn (ATTACK_SECONDS=60 ALL_SECONDS=300)"
	@echo "make lint    style, types, the arrows between rooms, and the table of counts in docs/architecture.md"
	@echo "make docs    build the site of the documentation into site/; fails at a link that leads nowhere"
	@echo "make albert  pretrain ALBERT with two peers and a monitor on this machine (ARGS=...)"
	@echo "make diloco  train a small GPT synchronously and with outer optimizers; draws loss against tokens and bytes"
	@echo "make bench   time averaging against hivemind, which gets an environment of its own (ARGS=...)"
	@echo "make bench-optimizer     train in every mode, with Shoal and with hivemind (ARGS=...)"
	@echo "make bench-outer         bytes, waiting and loss with outer optimizers"
	@echo "make bench-contiguous    time ContiguousParams against torch's optimizers and contiguous-params (ARGS=...)"
	@echo "make goodput             kill, stop, slow down and cut off trainers, of Shoal and of torchft, which gets an"
	@echo "             environment of its own; 2 hours (ARGS=\"--faults none kill --repetitions 1\", ARGS=--long)"
	@echo "make optimizers          try 205 optimizers of other packages, which get an environment of their own, in every"
	@echo "             world; a quarter of an hour (ARGS=\"--only hb. --worlds newcomer\"; UNDER_TEST=another/worktree)"
	@echo "make clean   remove the environments, caches and output"

demo: $(VENV)/.installed
	$(VENV)/bin/shoal demo $(ARGS)

# First the tests that need no process of their own, four files at a time; then those that start processes, two files at
# a time; then, one by one, those that compare times. Where PYTEST_ARGS names tests, those, long ones too.
PYTEST := $(VENV)/bin/python -m pytest
TOGETHER := --numprocesses 4 --dist loadfile
PROCESSES := --numprocesses 2 --dist loadfile
IN_TURN = $(PYTEST) $(TOGETHER) -m "$(1) and not processes and not timed" $(PYTEST_ARGS) && \
	$(PYTEST) $(PROCESSES) -m "$(1) and processes" $(PYTEST_ARGS) && \
	$(PYTEST) -m "$(1) and timed" $(PYTEST_ARGS)
test: $(VENV)/.installed-dev
ifeq (,$(findstring tests/,$(PYTEST_ARGS)))
	$(call IN_TURN,not long)
else
	$(PYTEST) $(PYTEST_ARGS)
endif

# All tests, of the soaks a minute, and the numeric ones as on older processors.
test-all: test test-long test-more test-capabilities

test-long: $(VENV)/.installed-dev
	$(call IN_TURN,long and not more)

# The other cases of tests of which the two above run few: see tests/few_cases.py.
test-more: $(VENV)/.installed-dev
	$(call IN_TURN,more)

# The tests whose numbers depend on the processor, with the kernels that others have: those of torch, MKL and oneDNN for
# AVX2 without AVX-512, and for SSE4 without either. The ranks of a file are started once.
NUMERIC := tests/flat tests/functional tests/sharding tests/compression tests/remote \
	$(addprefix tests/optim/test_,$(addsuffix .py,checkpoint equivalence grad_scaler gradients power_sgd_averager state step))
NUMERIC_TESTS = $(1) $(PYTEST) $(TOGETHER) -m "not processes" $(NUMERIC) $(PYTEST_ARGS) && \
	$(1) $(PYTEST) $(PROCESSES) -m processes $(NUMERIC) $(PYTEST_ARGS)

test-capabilities: $(VENV)/.installed-dev
	$(call NUMERIC_TESTS,ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2)
	$(call NUMERIC_TESTS,ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41)

# What chance decides in the simulator, many times over: for whoever has changed a protocol. A seed that fails says how
# to run it alone. What was run is in the file: delete it after a change.
# In the seeds from 100,000 on, of which there are WIDE, a liar knows more lies.
SEEDS := 10000
WIDE := $(shell expr $(SEEDS) / 4)
SWEEP_FILE := runs/sweep.jsonl
sweep: $(VENV)/.installed-dev
	$(VENV)/bin/python -m tests.simulation.sweep --liar half --seeds $(SEEDS) --wide $(WIDE) --resume $(SWEEP_FILE) $(ARGS)

# The same for the tests of single parts of the protocol, whose seeds are in the names of the tests.
SOAK := 60
sweep-tests: $(VENV)/.installed-dev
	SHOAL_SOAK=$(SOAK) $(PYTEST) --numprocesses auto tests/simulation $(PYTEST_ARGS)

# Real processes that are killed: in the demo, and at each phase of a round; and, while strangers attack, in the middle
# of large messages: about half an hour. Then as long again of trainers that are killed, stopped and started, in three
# modes.
TIMES := 5
CUTS := 2000
TREES := 100000
TREE_INPUTS := 1000000
CHAOS_MINUTES := 10
CHAOS_SEED := 1
SOAK_TESTS := tests/averaging/test_kill.py tests/averaging/test_restart.py tests/averaging/test_compressed_kill.py \
	$(addprefix tests/optim/test_,$(addsuffix .py,averagers_killed checkpoint compression diloco draws_of_delays failures \
	held_python interrupts killed refusals restarted_node statistics target wishes written_in_any_order)) \
	$(addprefix tests/integrations/test_,$(addsuffix .py,ends last_round ranks restart)) tests/p2p/test_lost_process.py \
	tests/monitor/test_web.py $(addprefix tests/cluster/test_,$(addsuffix .py,killed strands team_delays))
soak: $(VENV)/.installed-dev
	for time in $$(seq $(TIMES)); do \
		$(VENV)/bin/shoal demo && SHOAL_KILLS=20 $(PYTEST) $(SOAK_TESTS) $(PYTEST_ARGS) || exit 1; \
	done
	$(MAKE) test-more
	$(VENV)/bin/python -m tests.soak.transport --times $(CUTS)
	$(VENV)/bin/python -m tests.soak.trees --examples $(TREES) --inputs $(TREE_INPUTS)
	SHOAL_SOAK=1 $(PYTEST) tests/soak/test_chaos.py -k promise
	for mode in default power_sgd delayed; do \
		$(VENV)/bin/python -m tests.soak.chaos --minutes $(CHAOS_MINUTES) --seed $(CHAOS_SEED) --mode $$mode || exit 1; \
	done

ATTACK_SECONDS := 60
ALL_SECONDS := 300
attacks: $(VENV)/.installed-dev
	$(VENV)/bin/python -m tests.attacks --each --seconds $(ATTACK_SECONDS)
	$(VENV)/bin/python -m tests.attacks --all --seconds $(ALL_SECONDS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy $(TYPED)
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m benchmarks.walk --check

# First the page of all messages, from the tables of the guides. Not with -q: mkdocs then takes warnings for no errors.
docs: $(VENV)/.installed-docs
	$(VENV)/bin/python docs/tools/troubleshooting.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build

bench: $(VENV)/.installed $(BENCH_VENV)/.installed
	$(VENV)/bin/python -m benchmarks.averaging --hivemind-python $(BENCH_VENV)/bin/python $(ARGS)

diloco: $(VENV)/.installed
	$(VENV)/bin/python -m examples.diloco $(ARGS)

albert: $(VENV)/.installed
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[albert]'
	$(VENV)/bin/python -m examples.albert $(ARGS)

bench-optimizer: $(VENV)/.installed $(BENCH_VENV)/.installed
	$(VENV)/bin/python -m benchmarks.optimizer --hivemind-python $(BENCH_VENV)/bin/python $(ARGS)

bench-outer: $(VENV)/.installed
	$(VENV)/bin/python -m benchmarks.outer $(ARGS)

bench-contiguous: $(VENV)/.installed
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps contiguous-params==1.0.0
	$(VENV)/bin/python -m benchmarks.contiguous $(ARGS)

goodput: $(VENV)/.installed $(TORCHFT_VENV)/.installed
	$(VENV)/bin/python -m benchmarks.goodput --torchft-python $(TORCHFT_VENV)/bin/python $(ARGS)

# The optimizers of twelve packages: alone, with a newcomer, in DiLoCo, saved and loaded, on flat memory, and sharded.
# ARGS="--write docs/guides/optimizers.md" puts the table there. UNDER_TEST is the tree whose Shoal is tried.
UNDER_TEST := $(CURDIR)
optimizers: $(ZOO_VENV)/.installed
	PYTHONPATH=$(UNDER_TEST):$(CURDIR) $(ZOO_VENV)/bin/python -P -m tests.zoo $(ARGS)

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(ZOO_VENV) $(TORCHFT_VENV) runs build dist site
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments. A stamp is written last, so what was interrupted is taken up again.

$(VENV)/.created $(BENCH_VENV)/.created $(ZOO_VENV)/.created $(TORCHFT_VENV)/.created:
	@test -n "$(PYTHON)" || { echo "Shoal needs Python 3.11 or newer, and there is no such python3.11 or python3 on" \
		"the PATH. Install one, or say where it is: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "PYTHON=$(PYTHON) does not run, or is" \
		"older than the Python 3.11 that Shoal needs." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: it has" \
		"no venv or no ensurepip. On Debian and Ubuntu install the package python3.11-venv (or python3-venv) and run" \
		"make again, or name another Python: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(@D)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt $(TORCH)
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@

$(BENCH_VENV)/.installed: $(BENCH_VENV)/.created
	$(BENCH_VENV)/bin/python $(PIP_INSTALL) $(TORCH)
	$(BENCH_VENV)/bin/python $(PIP_INSTALL) $(TORCH) hivemind==1.1.12 'numpy<2.4' bitsandbytes==0.45.5
	@touch $@

# Without what it depends on, which is torch of another version, and tools for GPUs.
$(TORCHFT_VENV)/.installed: $(TORCHFT_VENV)/.created
	$(TORCHFT_VENV)/bin/python $(PIP_INSTALL) $(TORCH) numpy opentelemetry-api opentelemetry-sdk \
		opentelemetry-exporter-otlp-proto-http
	$(TORCHFT_VENV)/bin/python $(PIP_INSTALL) --no-deps torchft-nightly==2026.10.26
	@touch $@

$(ZOO_VENV)/.installed: $(ZOO_VENV)/.created pyproject.toml constraints.txt tests/zoo/requirements.txt
	$(ZOO_VENV)/bin/python $(PIP_INSTALL) -c constraints.txt $(TORCH)
	$(ZOO_VENV)/bin/python $(PIP_INSTALL) -c constraints.txt $(TORCH) -r tests/zoo/requirements.txt -e .
	@touch $@

# make demo   stock against holmes on two emulated clusters, from a fresh clone, with one command
# make test   unit tests, and real engines on emulated networks; a table at the end names each framework, passed or SKIPPED.
#             make unit: tests/ alone; some of them need network namespaces, too
# make nightly  all tests, the slow ones too (a landing runs a share: tests/selection.py), over gloo and on emulated GPUs; mutants;
#             old versions of the frameworks: hours
# make checkouts  clones what tests need besides Python packages: Megatron-LM, Megatron-DeepSpeed, NCCL's source
# make torchtitan  torchtitan into build/torchtitan, for its tests (make test does it)
# make check  lint and types
# make docs   the site of docs/ into build/site, strictly: a link to nothing, or a block that differs from the code, fails
# make gpu    CUDA and NCCL without a GPU: the tests of emulated GPUs, in an environment of their own (.venv-gpu, 6 GB)
# make gpu-next  one test file of each engine over NCCL, as in `make gpu`, on a newer torch (NEXT_TORCH) in an environment of
#             its own (.venv-gpu215, 6 GB). GPU_NEXT=FOLDER: an environment that exists, with torch, requirements/gpu.txt and
#             this tree (pip install --no-deps -e . -e ./lab) in it
# make nccl   what only a GPU can show; writes nccl-report.json to send back (two nodes: NODE=0 or 1, MASTER_ADDR, CLUSTER)
# make physical  the tests that `make gpu` runs over NCCL, too, on one physical GPU that all ranks share (root; BIN as for nccl;
#             after make gpu-libraries, for the lab's network plugin)
# make matrix the versions that people have, each row in an environment of its own (benchmarks/matrix.py); it may be ended at any
#             time and goes on there. NEXT=1: only what no longer fits the newest of everything; ROWS="NAME,...": these
#             once more; SLIM=1: without CUDA's libraries, 2 GB an environment instead of 5
# make soak   joined jobs under random faults for half an hour (MINUTES=30 SEED=1 SOAK_ARGS=--keep=DIR); build/soak.jsonl has what
#             happened, and DIR the logs of the jobs and of the coordinator
# make faults every fault of joined jobs, WORKERS=6 at a time
# make locks  after a change of requirements/*.txt: the hashes of all packages, in requirements/locked (UPGRADE=1: newer ones)
# make .venv  the environment that all use (Python 3.10 to 3.14; PYTHON=... chooses the interpreter)
#
# Where pip would take a torch with gigabytes of CUDA libraries: make demo TORCH_ARGS="--index-url <an index of CPU builds>"

PYTHON ?= python3
# pip leaves compiling to the first import: once here, or each of thousands of ranks would compile torch again.
unexport PYTHONDONTWRITEBYTECODE
IMPORT_ONCE = PYTHONPATH=examples/megatron_core/on_cpu $(1)/python -W ignore -c \
   'import torch._dynamo, deepspeed, scipy.optimize, megatron_cpu_shim, megatron.core.models.gpt' >/dev/null 2>&1 || true
BIN := .venv/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq --no-input --no-compile
# Packages of requirements/locked, which name all that they need: only files with those hashes, built (where there is no
# wheel) by the tools of locked/build.txt. pip would bring other tools into a build, without looking at their hashes.
LOCKED := --require-hashes --no-deps --no-build-isolation
STAMP := .venv/installed
TESTS := $(wildcard tests integration_tests)

# What emulated GPUs need besides: the CUDA build of torch, g++, and NCCL's source.
GPU_BIN := .venv-gpu/bin
GPU_PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(GPU_BIN)/python -m pip install -qq --no-input --no-compile
GPU_STAMP := .venv-gpu/installed
# Tests of `make test` and `make nccl` that run over NCCL on emulated GPUs, too (tests/carriers.py, integration_tests/jobs.py):
# in a landing one file for each engine, and what reduces gradients and chooses networks; with HOLMES_TEST_FULL=1 all.
ON_BOTH_IN_A_LANDING := $(addprefix tests/runtime/reduce/test_,reducer.py hierarchical.py) tests/runtime/groups/test_wire.py \
   $(addprefix integration_tests/,nccl/test_gpus.py deepspeed/test_two_clusters.py megatron/test_core.py \
   stacks/test_pipelining.py test_reduction_lab.py)
ON_BOTH_IN_ALL := tests/runtime/test_compress.py tests/runtime/measure/test_deaths.py $(addprefix tests/runtime/reduce/test_,owned.py reducer.py tied.py hierarchical.py) \
   tests/runtime/groups/test_wire.py integration_tests/nccl/test_gpus.py $(addprefix integration_tests/,\
   $(addprefix deepspeed/test_,two_clusters.py tied.py zero.py narrow.py passes.py partition.py resume.py overlap.py \
   joined.py) $(addprefix megatron/test_,core.py slices.py joined.py experts.py) joined/test_examples.py \
   $(addprefix stacks/test_,pipelining.py fsdp2.py trainer.py trainer_joined.py torchtitan.py) \
   $(addprefix commands/test_,telemetry.py doctor.py probe.py profile_and_tune.py) $(addprefix faults/test_,faults.py restart.py) \
   rows/test_rows.py backends/test_backends.py test_reduction_lab.py test_unequal_lab.py test_adapt.py test_adapt_sums.py) \
   tests/patches/torch/test_ddp.py
ON_BOTH := $(if $(filter 1,$(HOLMES_TEST_FULL)),$(ON_BOTH_IN_ALL),$(ON_BOTH_IN_A_LANDING))

# The torch of `make gpu-next`, its environment, and its tests: one file of each engine, NCCL's networks, and its backends.
NEXT_TORCH ?= 2.15.0
NEXT_VENV := .venv-gpu$(subst .,,$(basename $(NEXT_TORCH)))
GPU_NEXT ?= $(NEXT_VENV)
NEXT_ENGINES := tests/patches/torch/test_ddp.py $(addprefix integration_tests/,stacks/test_fsdp2.py \
   deepspeed/test_two_clusters.py deepspeed/test_zero.py megatron/test_core.py stacks/test_pipelining.py)
ON_NEXT := $(NEXT_ENGINES) $(addprefix integration_tests/,gpu/test_networks.py gpu/test_freed_output.py \
   backends/test_backends.py)

# Each run of pytest writes what became of its tests to RESULTS/PART.xml (JUnit XML). tests/summary.py makes a table of them.
RESULTS := build/results
# $(call PYTEST,PYTHON,PART): results of an earlier run must not be taken for those of a run that ended early.
PYTEST = rm -f $(RESULTS)/$(2).xml; $(1) -m pytest --timeout=900 --junitxml=$(RESULTS)/$(2).xml
# $(call SUMMARY,PART...): .ci/run and make nightly print one summary of all parts themselves.
SUMMARY = $(if $(filter no,$(SUMMARIZE)),true,$(BIN)/python tests/summary.py $(patsubst %,$(RESULTS)/%.xml,$(1)))

.PHONY: demo test unit gpu gpu-next gpu-libraries nccl physical check docs matrix soak faults nightly mutants old-versions checkouts \
   summary slow-tests torchtitan locks .venv .venv-gpu tools clean

demo: tools .venv
	$(BIN)/holmes demo

# Both rooms at once, each with its report at the end, by two workers each: much of either waits for processes that it
# started. A file of tests stays in one worker, because its tests share labs and runs.
ROOM_WORKERS ?= 2

test: tools .venv torchtitan
	@mkdir -p $(RESULTS); status=0; started=; \
	for room in $(TESTS); do \
	    { $(call PYTEST,$(BIN)/python,$$room) $$room -n $(ROOM_WORKERS) --dist loadfile $(PYTEST_ARGS); } \
	        > build/$$room.log 2>&1 & \
	    started="$$started $$!:$$room"; \
	done; \
	for one in $$started; do wait $${one%%:*} || status=1; cat build/$${one#*:}.log; done; \
	$(call SUMMARY,$(TESTS)); exit $$status

# The runtime's tests are in `make test`. Those of operators run on an emulated GPU themselves, so they are a run of their own;
# after them, beside the others, what runs on both carriers. The others wait for networks and processes most of their time,
# so GPU_WORKERS of them run at once; each needs up to 5 GB of memory.
GPU_WORKERS ?= 2

gpu: gpu-libraries torchtitan
	@mkdir -p $(RESULTS); status=0; \
	{ code=0; $(call PYTEST,$(GPU_BIN)/python,gpu-operators) integration_tests/gpu/operators $(PYTEST_ARGS) || code=1; \
	  export HOLMES_TEST_CARRIER=nccl; $(call PYTEST,$(GPU_BIN)/python,over-nccl) $(ON_BOTH) $(PYTEST_ARGS) || code=1; \
	  exit $$code; } >build/gpu-both.log 2>&1 & both=$$!; \
	$(call PYTEST,$(GPU_BIN)/python,gpu) -rs -n $(GPU_WORKERS) --dist loadfile integration_tests/gpu \
	   --ignore integration_tests/gpu/operators $(PYTEST_ARGS) || status=1; \
	wait $$both || status=1; cat build/gpu-both.log; exit $$status

# Builds the emulated GPU: some minutes, once for each version of holmes, torch and NCCL.
gpu-libraries: tools .venv-gpu
	@$(GPU_BIN)/python -m holmes_ext.cli.main lab build --python $(GPU_BIN)/python || { \
	   test -z "$$HOLMES_NCCL_SOURCE" && test ! -e "$${XDG_CACHE_HOME:-$$HOME/.cache}/holmes_ext/nccl" && \
	   echo "make: NO NCCL SOURCE, so whatever needs NCCL is skipped: make checkouts"; }

# All tests of these files, unless HOLMES_TEST_FULL says otherwise: over NCCL, few of them belong to a landing.
gpu-next: tools $(if $(filter $(NEXT_VENV),$(GPU_NEXT)),$(NEXT_VENV)/installed)
	@cd / && $(abspath $(GPU_NEXT))/bin/python -c 'import sys, holmes_ext; sys.exit(holmes_ext.__path__[0] != sys.argv[1])' \
	   $(CURDIR)/holmes_ext 2>/dev/null || { echo "make: $(GPU_NEXT) does not have the holmes_ext of this folder:" \
	   "$(GPU_NEXT)/bin/python -m pip install --no-deps -e . -e ./lab" >&2; exit 1; }
	@$(GPU_NEXT)/bin/python -m holmes_ext.cli.main lab build --python $(GPU_NEXT)/bin/python
	@mkdir -p $(RESULTS); export HOLMES_TEST_CARRIER=nccl HOLMES_TEST_FULL=$${HOLMES_TEST_FULL:-1}; \
	$(call PYTEST,$(GPU_NEXT)/bin/python,gpu-next) $(ON_NEXT) $(PYTEST_ARGS)

unit: tools .venv
	@mkdir -p $(RESULTS)
	$(call PYTEST,$(BIN)/python,tests) tests $(PYTEST_ARGS)

# With the python that has the CUDA build of torch: make nccl BIN=/path/to/its/bin (pip install -e . pytest rich there).
REPORT ?= nccl-report.json

nccl:
	HOLMES_NCCL_REPORT=$(abspath $(REPORT)) $(if $(NODE),HOLMES_NCCL_NODE=$(NODE)) $(if $(MASTER_ADDR),MASTER_ADDR=$(MASTER_ADDR)) \
	   $(if $(CLUSTER),HOLMES_NCCL_CLUSTER=$(abspath $(CLUSTER))) $(BIN)/python -m pytest -v -rs integration_tests/nccl

physical:
	HOLMES_TEST_CARRIER=cuda $(BIN)/python -m pytest --timeout=900 -rs $(ON_BOTH_IN_ALL) $(PYTEST_ARGS)

# With the pip of the environment that the goal needs anyway.
TORCHTITAN := build/torchtitan/installed
TORCHTITAN_VENV := $(if $(filter gpu,$(MAKECMDGOALS)),.venv-gpu,.venv)

torchtitan: $(TORCHTITAN)

$(TORCHTITAN): requirements/locked/torchtitan.txt | $(TORCHTITAN_VENV)
	@echo "make: installing torchtitan and what it imports into build/torchtitan (270 MB, once)"
	@rm -rf build/torchtitan
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(TORCHTITAN_VENV)/bin/python -m pip install -qq --no-input --no-compile $(LOCKED) \
	   --target build/torchtitan -r $<
	@touch $@

# After make nightly: how long each slow test takes (tests/slow_tests.json). A landing runs a third of them.
slow-tests: .venv
	$(BIN)/python tests/slow_tests.py $(wildcard $(RESULTS)/*.xml)

# Of whatever ran last.
summary:
	@$(call SUMMARY,tests integration_tests gpu-operators gpu over-nccl gpu-next)

checkouts:
	@$(PYTHON) tests/checkouts.py

check: .venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet . patches
	$(BIN)/mypy

docs: .venv
	@$(PIP) $(LOCKED) -r requirements/locked/docs.txt
	$(BIN)/python docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Not part of `make test`: some minutes and up to 5 GB for each row. ROWS="torch 2.6.0,..." makes these once more.
matrix: tools .venv
	$(BIN)/python benchmarks/matrix.py $(if $(NEXT),--next,--json benchmarks/results/matrix.json) \
	   $(if $(ROWS),--cases "$(ROWS)") $(if $(SLIM),--slim) $(if $(TORCH_ARGS),--pip "$(TORCH_ARGS)")

MINUTES ?= 30
SEED ?= 1

soak: .venv
	PYTHONPATH=tests:. $(BIN)/python integration_tests/joined/soak.py --minutes $(MINUTES) --seed $(SEED) $(SOAK_ARGS)

WORKERS ?= 6
FAULTS := integration_tests/joined/test_faults.py

faults: .venv
	@mkdir -p $(RESULTS)
	export HOLMES_TEST_FULL=1; $(call PYTEST,$(BIN)/python,faults) -n $(WORKERS) --dist worksteal $(FAULTS) $(PYTEST_ARGS)

# Everything that a landing leaves out. What fails does not end the rest; the summary comes last.
NIGHTLY := test gpu gpu-next mutants old-versions

nightly: tools .venv
	@rm -rf $(RESULTS)
	@failed=; for part in $(NIGHTLY); do \
	    HOLMES_TEST_FULL=1 make --no-print-directory $$part SUMMARIZE=no || failed="$$failed $$part"; \
	done; \
	make --no-print-directory summary; \
	test -z "$$failed" || { echo "make nightly: failed:$$failed" >&2; exit 1; }

# Breaks the code of joined jobs in many ways, and fails where their tests do not notice.
mutants: .venv
	HOLMES_TEST_FULL=0 $(BIN)/python integration_tests/joined/mutants.py

# Of the rows of `make matrix`; an environment for each, which goes afterwards.
OLD_VERSIONS ?= deepspeed 0.16.9,megatron-core 0.12.3

old-versions: tools .venv
	HOLMES_TEST_FULL=0 $(BIN)/python benchmarks/matrix.py --cases "$(OLD_VERSIONS)" --parts few $(if $(TORCH_ARGS),--pip "$(TORCH_ARGS)")

.venv: $(STAMP)

$(STAMP): $(addprefix requirements/,torch.txt $(addprefix locked/,build.txt dev.txt no-deps.txt)) setup.py pyproject.toml lab/pyproject.toml holmes_ext.pth
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "make: holmes_ext needs Python 3.10 or newer: make PYTHON=python3.11 ...")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "make: python has no venv: apt-get install python3-venv" >&2; exit 1; }
	@echo "make: installing the pinned versions into .venv (some minutes, once)"
	@$(PYTHON) -m venv .venv
	@$(PIP) $(LOCKED) -r requirements/locked/build.txt
	@$(PIP) $(LOCKED) -r requirements/locked/dev.txt
	@$(PIP) -r requirements/torch.txt $(TORCH_ARGS)
	@$(PIP) $(LOCKED) -r requirements/locked/no-deps.txt
	@$(PIP) --no-deps --no-build-isolation -e . -e ./lab
	@$(call IMPORT_ONCE,$(BIN))
	@touch $@

.venv-gpu: $(GPU_STAMP)

# pip's own index, and no folder of wheels: there may be a build for the CPU in it. TORCH_GPU_ARGS for another index, whose
# files have other hashes. DeepSpeed is built before torch is there, as it would compile for the torch that it finds.
$(GPU_STAMP): $(addprefix requirements/,torch.txt $(addprefix locked/,build.txt gpu.txt torch.txt)) setup.py pyproject.toml lab/pyproject.toml holmes_ext.pth
	@echo "make: installing the CUDA build of torch and what runs on it into .venv-gpu (5 GB of disk, 2 to 10 minutes, once)"
	@$(PYTHON) -m venv .venv-gpu
	@$(GPU_PIP) $(LOCKED) -r requirements/locked/build.txt
	@DS_BUILD_OPS=0 $(GPU_PIP) $(LOCKED) -r requirements/locked/gpu.txt
	@PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= $(GPU_PIP) \
	   $(if $(TORCH_GPU_ARGS),-r requirements/torch.txt $(TORCH_GPU_ARGS),$(LOCKED) -r requirements/locked/torch.txt)
	@$(GPU_BIN)/python -c 'import sys; sys.exit("+cpu" in open(sys.argv[1]).read() and "make: pip took a torch for the CPU; see TORCH_GPU_ARGS")' \
	   $$(echo .venv-gpu/lib/python3*/site-packages/torch/version.py)
	@$(GPU_PIP) --no-deps --no-build-isolation -e . -e ./lab
	@$(call IMPORT_ONCE,$(GPU_BIN))
	@touch $@

# uv and this script need Python 3.11. uv itself comes without a hash: nothing but these files is made with it.
locks:
	@test -x build/uv/bin/uv || { $(PYTHON) -m venv build/uv && build/uv/bin/python -m pip install -qq --no-input uv==0.13.9; }
	@build/uv/bin/python requirements/lock.py build/uv/bin/uv $(if $(UPGRADE),--upgrade)

NEXT_PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(NEXT_VENV)/bin/python -m pip install -qq --no-input --no-compile

# Without pip's configuration, which may have a constraint for an older torch.
$(NEXT_VENV)/installed: $(addprefix requirements/locked/,build.txt gpu.txt) setup.py pyproject.toml lab/pyproject.toml holmes_ext.pth
	@echo "make: installing torch $(NEXT_TORCH) and what runs on it into $(NEXT_VENV) (6 GB of disk, 2 to 10 minutes, once)"
	@$(PYTHON) -m venv $(NEXT_VENV)
	@$(NEXT_PIP) $(LOCKED) -r requirements/locked/build.txt
	@DS_BUILD_OPS=0 $(NEXT_PIP) $(LOCKED) -r requirements/locked/gpu.txt
	@PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= $(NEXT_PIP) torch==$(NEXT_TORCH) $(TORCH_GPU_ARGS)
	@$(NEXT_PIP) --no-deps --no-build-isolation -e . -e ./lab
	@$(call IMPORT_ONCE,$(NEXT_VENV)/bin)
	@touch $@

# What is needed besides Python packages: iproute2, and the right to make network namespaces.
tools:
	@for tool in ip tc unshare; do command -v $$tool >/dev/null || { \
	   echo "make: there is no '$$tool': apt-get install iproute2 util-linux" >&2; exit 1; }; done
	@test "$$(id -u)" = 0 || unshare --user --map-root-user --net true 2>/dev/null || { \
	   echo "make: emulated clusters need root or unprivileged user namespaces: sudo make ... (or sysctl kernel.unprivileged_userns_clone=1)" >&2; exit 1; }

clean:
	rm -rf .venv .venv-gpu $(NEXT_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

# Every target sets up what it needs; see scripts/setup. `make` alone lists the targets.
MAKEFLAGS += --no-print-directory
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LINT_STAMP := $(VENV)/.lint
TRAIN_STAMP := $(VENV)/.train
NATIVE := $(wildcard native/*.cpp native/*.h)
NATIVE_TESTS := $(wildcard tests/native/*.cpp tests/native/*.h)
# ThreadSanitizer of older compilers cannot map its shadow where the kernel randomises addresses widely.
FIXED_ADDRESSES := $(shell setarch -R true 2>/dev/null && echo setarch -R)
JOBS := $(shell nproc)
# A file of tests stays together; more workers than four would wait for the disk. PYTEST comes last: its options win.
WORKERS := -n $(JOBS) --maxprocesses 4 --dist loadfile

.PHONY: help demo test lint format bench dev native-test sanitize clean distclean

help:
	@echo "make demo         stream a model larger than its memory limit, in four cells, and print the table"
	@echo "make test         run the default tests (PYTEST='-m slow' and the like are passed on)"
	@echo "make lint         ruff, mypy --strict, clang-format"
	@echo "make format       let ruff and clang-format rewrite the files"
	@echo "make bench        run every benchmark (minutes each)"
	@echo "make native-test  run tests/native; make sanitize runs them under three sanitizers"
	@echo "make dev          install into $(VENV) only, editable"
	@echo "make clean        remove build products; make distclean removes $(VENV) too"

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt scripts/setup $(NATIVE)
	@scripts/setup
	@touch $@

$(LINT_STAMP): $(STAMP)
	@scripts/setup lint
	@touch $@

$(TRAIN_STAMP): $(STAMP)
	@scripts/setup train train-test
	@touch $@

dev: $(STAMP)

demo: $(STAMP)
	$(BIN)/moetriage demo

test: $(TRAIN_STAMP)
	$(BIN)/pytest $(WORKERS) $(PYTEST)

lint: $(LINT_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/clang-format --dry-run -Werror $(NATIVE) $(NATIVE_TESTS)

format: $(LINT_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE) $(NATIVE_TESTS)

bench: $(STAMP)
	set -e; for bench in benchmarks/bench_*.py; do echo "== $$bench"; $(BIN)/python $$bench; done

# Native tests need no Python; each kind of build has a folder of its own.
build-native = cmake -S . -B build/$(1) -DMOETRIAGE_NATIVE_TESTS=ON -DCMAKE_BUILD_TYPE=$(2) -DMOETRIAGE_SANITIZE=$(3) >/dev/null \
	&& cmake --build build/$(1) --parallel $(JOBS) && $(FIXED_ADDRESSES) ctest --test-dir build/$(1) --output-on-failure

native-test:
	$(call build-native,native,Release,)

sanitize:
	$(call build-native,asan,RelWithDebInfo,address$(comma)undefined)
	$(call build-native,tsan,RelWithDebInfo,thread)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf $(VENV) src/moetriage/_native.pyi

comma := ,

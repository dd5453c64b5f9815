# Two commands: `make train` and `make test`. Each sets up .venv by itself; a second call reuses it.
# Before a merge: `make test-all`.
PYTHON ?= python3
CONFIG ?= configs/quickstart.yaml
JOBS ?= 2
OUTPUT ?= runs/$(basename $(notdir $(CONFIG)))-$(shell date +%Y%m%d-%H%M%S)

# As torchrun has it: one thread per process. The models here are small, and loader workers take the other cores.
export OMP_NUM_THREADS ?= 1

.PHONY: train test test-all mutants gpu docs
.DELETE_ON_ERROR:

train: .venv/ready
	.venv/bin/python train.py $(CONFIG) --output $(OUTPUT)

test test-all: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/python -m pytest -n $(JOBS) $(PYTEST)

test-all: PYTEST = -m 'not stress and not timm'

mutants: .venv/ready
	.venv/bin/python -m tests.support.mutants --jobs $(JOBS)

gpu: .venv/ready
	.venv/bin/python -m bench.gpu_run --output runs/gpu

# The site, in site/, of the Markdown files at their places. Only the options of mechanisms need .venv and torch.
docs: build/venv/ready .venv/ready
	rm -rf build/docs
	mkdir -p build/docs
	cp -r README.md CONTRIBUTING.md CHANGELOG.md CITATION.cff docs configs reference build/docs
	.venv/bin/python -m engine.config.option_pages attention > build/docs/docs/options/attention.md
	build/venv/bin/properdocs build --strict --config-file mkdocs.yml
	@echo "Read and search it at http://localhost:8000 with: $(PYTHON) -m http.server --directory site"

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; name it: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --editable '.[test]'
	touch $@

build/venv/ready: pyproject.toml
	$(PYTHON) -m venv build/venv
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])' \
		| xargs build/venv/bin/python -m pip install --quiet
	touch $@

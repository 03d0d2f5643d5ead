# Everything a developer or CI runs. Needs Python 3.12 or 3.13 and make; installs into .venv.
PY := .venv/bin/python
OLDEST := 0.11.2
EXPERIMENTS := configs/experiments
GPU_WHEELS := annotated-types array-record cffi cloudpickle cryptography flatbuffers grain narwhals packaging plotly portpicker pycparser pydantic \
  pydantic-core safetensors tomlkit typing-inspection
# What such a machine has: jax for CUDA 13 and the libraries of a JAX image. `gpu-wheels` is the rest.
GPU_MACHINE := 'jax[cuda13]==$(OLDEST)' flax optax orbax-checkpoint chex numpy typer nvidia-ml-py jaxtyping
H100S := --set cluster='{name="dgx_h100",hosts=2}'

.PHONY: setup demo test test-slow test-oldest check-maxtext test-sinks wheel-check corruption attack kill-matrix soak gpu-wheels gpu-rehearsal check notebook docs clean
setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@py=; for p in python3.12 python3.13 python3 python; do \
	  if $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' 2>/dev/null; then py=$$p; break; fi; done; \
	if [ -z "$$py" ]; then \
	  echo "make setup: no Python 3.12 or 3.13 on the PATH. Install one, e.g. 'apt-get install python3.12 python3.12-venv',"; \
	  echo "'brew install python@3.12' or 'uv python install 3.12', and run make again."; exit 2; fi; \
	echo "make setup: using $$($$py --version) ($$py)"; \
	test -x $(PY) || $$py -m venv .venv || { \
	  echo "make setup: $$py cannot make a virtual environment; on Debian: apt-get install python3.12-venv"; exit 2; }
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[plan,dev]'
	@touch $@

# The main job on real input: train on 8 virtual devices, profile it, plan it and a larger one for 16 absent H100s.
demo: setup
	@rm -rf runs/demo runs/demo-plan runs/llama3_8b
	.venv/bin/meshkit train $(EXPERIMENTS)/llama_debug_cpu.toml --out runs/demo
	.venv/bin/meshkit profile runs/demo
	.venv/bin/meshkit plan $(EXPERIMENTS)/llama_debug_cpu.toml $(H100S) --set mesh.data='{infiniband=2}' --set mesh.fsdp=4 --out runs/demo-plan
	.venv/bin/meshkit plan $(EXPERIMENTS)/llama3_8b.toml --out runs/llama3_8b
	@echo "open runs/demo/report.html and runs/llama3_8b/report.html in a browser"

test: setup
	$(PY) -m pytest -m 'not slow' -n auto --maxprocesses 4 --dist loadfile

test-slow: setup
	$(PY) -m pytest -m slow

# The sinks that the guide shows, with the packages that they are for, which write offline. Downloads them.
test-sinks: setup
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt --upgrade --target build/sinks \
	  wandb tensorboard mlflow-skinny sqlalchemy alembic
	PYTHONPATH=build/sinks $(PY) -m pytest -q tests/runs/test_metrics_copied_sinks.py tests/runs/test_metrics_sinks.py

# What a user has: the wheel alone in a new environment, an empty folder, an empty HOME. Downloads what `[plan]` needs.
WHEEL := build/wheel-check
wheel-check: setup
	@rm -rf $(WHEEL) && mkdir -p $(WHEEL)/home $(WHEEL)/empty
	@$(PY) -m pip wheel -qq --disable-pip-version-check --no-deps -w $(WHEEL) .
	@$(PY) -m venv $(WHEEL)/venv
	@$(WHEEL)/venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt "$$(ls $(WHEEL)/*.whl)[plan]"
	@cd $(WHEEL)/empty && export HOME="$$PWD/../home" PATH="$$PWD/../venv/bin:$$PATH" && set -ex && \
	  meshkit --version && meshkit new --out mine.toml && meshkit explain mine.toml && \
	  meshkit plan mine.toml --set cluster=dgx_h100 --out runs/plan && meshkit train mine.toml --set train.steps=20 --out runs/mine && \
	  meshkit profile runs/mine && meshkit plan llama3_8b --out runs/llama3_8b && meshkit train llama_debug_cpu --set train.steps=40

# The default suite with the oldest jax that meshkit supports, all else as constraints.txt has it, in .venv-oldest.
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest -m 'not slow' -n auto --maxprocesses 4 --dist loadfile

.venv-oldest/installed: .venv/installed
	@$(PY) -m venv .venv-oldest
	@sed -E 's/^(jax|jaxlib|jax-cuda12-pjrt|jax-cuda12-plugin)==.*/\1==$(OLDEST)/' constraints.txt > .venv-oldest/constraints.txt
	@.venv-oldest/bin/python -m pip install -qq --disable-pip-version-check -c .venv-oldest/constraints.txt -e '.[plan,dev]'
	@touch $@

# MaxText's own step, planned and rehearsed, then the guide's commands by the wheel in an empty folder, each with its time, in
# an environment of its own. Downloads MaxText.
MAXTEXT_ENV := .venv-maxtext
check-maxtext: $(MAXTEXT_ENV)/installed
	@rm -rf build/maxtext
	@$(PY) -m pip wheel -qq --disable-pip-version-check --no-deps -w build/maxtext .
	@$(MAXTEXT_ENV)/bin/python -m pip install -qq --disable-pip-version-check --force-reinstall --no-deps build/maxtext/*.whl
	$(MAXTEXT_ENV)/bin/python -m pytest -q -s -m slow tests/integrations

# Of constraints.txt jax alone: with all its pins pip chooses for more than ten minutes, without them for one.
$(MAXTEXT_ENV)/installed: pyproject.toml .venv/installed
	@$(PY) -m venv $(MAXTEXT_ENV)
	@grep '^jax' constraints.txt > $(MAXTEXT_ENV)/constraints.txt
	@$(MAXTEXT_ENV)/bin/python -m pip install -qq --disable-pip-version-check -c $(MAXTEXT_ENV)/constraints.txt '.[plan,maxtext]' \
	  pytest hypothesis chex beartype
	@touch $@

# Seeded damages to a checkpoint's files, and what is restored after each: a minute.
corruption: setup
	@$(PY) -m benchmarks.corruption

# Seeded attacks on all that is read, rendered and saved: a tenth of them in ten minutes; ALL=1 for all, WRITE=1 to
# put the tables into benchmarks/attack/README.md.
attack: setup
	@$(PY) -m benchmarks.attack $(if $(ALL),--all) $(if $(WRITE),--write)

# Every fault in every phase of a gang, into benchmarks/kill_matrix; goes on where it stopped: 15 minutes.
kill-matrix: setup
	@$(PY) -m benchmarks.kill_matrix

# 300 steps with ten faults at random moments: 5 minutes.
soak: setup
	@$(PY) -m benchmarks.kill_matrix.soak

# What a borrowed GPU machine with jax for CUDA lacks to run `python -m benchmarks.gpu`: wheels of CPython 3.12, manylinux.
gpu-wheels: setup
	@rm -rf build/gpu-wheels
	@$(PY) -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
	  --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
	  --platform manylinux2014_x86_64 -c constraints.txt -d build/gpu-wheels $(GPU_WHEELS)
	@$(PY) -m pip wheel -qq --disable-pip-version-check --no-deps -w build/gpu-wheels .
	@du -sh build/gpu-wheels

# The whole list at toy size, all checks, and a plan, in a clean environment that holds what such a machine holds, and those wheels.
gpu-rehearsal: gpu-wheels .venv-gpu/installed
	@rm -rf build/gpu-site runs/gpu-rehearsal
	@.venv-gpu/bin/python -m pip install -qq --disable-pip-version-check --no-index --no-deps --target build/gpu-site build/gpu-wheels/*.whl
	@export PYTHONPATH=$$PWD/build/gpu-site PATH=$$PWD/.venv-gpu/bin:$$PATH; \
	  python -m pip check && \
	  python -m benchmarks.gpu --out runs/gpu-rehearsal --toy --rows --minutes 60 && \
	  python -m benchmarks.gpu --score runs/gpu-rehearsal --rows && \
	  python -m benchmarks.gpu --out runs/gpu-rehearsal --toy --minutes 60 && \
	  python -m benchmarks.gpu --score runs/gpu-rehearsal && \
	  python -m benchmarks.gpu --check && \
	  python -m meshkit plan $(EXPERIMENTS)/llama3_8b.toml --out runs/gpu-rehearsal/plan

.venv-gpu/installed: .venv/installed
	@$(PY) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || { \
	  echo "make gpu-rehearsal: the packed wheels are of Python 3.12, and .venv has $$($(PY) --version)"; exit 2; }
	@rm -rf .venv-gpu && $(PY) -m venv .venv-gpu
	@sed -E 's/^(jax|jaxlib)==.*/\1==$(OLDEST)/' constraints.txt > .venv-gpu/constraints.txt
	@.venv-gpu/bin/python -m pip install -qq --disable-pip-version-check -c .venv-gpu/constraints.txt $(GPU_MACHINE)
	@touch $@

check: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	.venv/bin/lint-imports --no-cache

# The notebook of docs, run again in a kernel, its outputs in place.
notebook: setup
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[notebook]'
	@MESHKIT_WRITE_NOTEBOOK=1 $(PY) -m pytest -q tests/test_notebook.py

docs: setup
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(PY) -m typer meshkit.cli utils docs --name meshkit --output docs/reference/options.md
	.venv/bin/mkdocs build --strict

clean:
	rm -rf .venv .venv-oldest .venv-maxtext .venv-gpu runs site build dist docs/reference/options.md

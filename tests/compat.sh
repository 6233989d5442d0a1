#!/usr/bin/env bash
# The kernels on the oldest triton that minifer supports, 3.6.0, whose interpreter needs numpy 2.3:
# what tests/kernels compiles ahead of time, and what it interprets.
#
#   tests/compat.sh [FOLDER] [PYTEST ARGUMENTS]
#
# FOLDER: where the virtual environment is made, or found again (default: a new one, deleted
# afterwards). Without arguments all of tests/kernels runs. Not a part of `.ci/run`: it downloads torch and triton, and takes minutes.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

if [[ $# -gt 0 && $1 != -* ]]; then
    folder=$1
    shift
else
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
python=$folder/bin/python

pinned() { # NAME…: the lines of constraints.txt
    local name
    for name in "$@"; do
        grep -i "^$name==" "$root/constraints.txt"
    done
}

if [[ ! -x $python ]] || ! "$python" -c 'import pytest, triton; assert triton.__version__ == "3.6.0"'; then
    "${PYTHON:-python3}" -m venv "$folder"
    pip=("$python" -m pip install -q --disable-pip-version-check)
    # torch's Linux wheels pin a newer triton, so nothing may resolve torch's dependencies again.
    "${pip[@]}" --no-deps $(pinned torch) triton==3.6.0 'numpy==2.3.*'
    "${pip[@]}" --no-deps $(pinned filelock typing_extensions sympy mpmath networkx Jinja2 \
        MarkupSafe fsspec setuptools safetensors tokenizers huggingface_hub tqdm pytest iniconfig \
        packaging pluggy Pygments hypothesis sortedcontainers attrs)
    "${pip[@]}" --no-deps --no-build-isolation -e "$root"
fi
"$python" - <<'PYTHON'
import numpy, torch, triton
print(f"triton {triton.__version__}, numpy {numpy.__version__}, torch {torch.__version__}")
PYTHON

cd "$root"
# addopts: pyproject.toml's need nbval. What is slow or needs a GPU is left out, as there.
OMP_NUM_THREADS=1 TRITON_INTERPRET=1 "$python" -m pytest -q -o addopts="" -m "not slow and not gpu" \
    --strict-markers -p no:cacheprovider "${@:-tests/kernels}"

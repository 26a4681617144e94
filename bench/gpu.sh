#!/usr/bin/env bash
# Derivatives and tests on a GPU, in at most 8 minutes: one Markdown file. Needs no network.
#
#     bench/gpu.sh                          on CUDA, to gpu.md
#     bench/gpu.sh vulkan figures.md        on another backend of Taichi, to another file
#     bench/gpu.sh cpu dry.md --only sphere --no-tests      a dry run
#
# On a bare machine with Python 3.12 and NumPy: carry the wheels that `pip download -d wheels --python-version 3.12
# --only-binary :all: taichi pytest scipy` has brought into wheels/, beside this checkout's pyproject.toml.
set -euo pipefail

arch=${1:-cuda}
output=$(realpath -m "${2:-gpu.md}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python3

if ! $python -c "import taichi, pytest, scipy" >/dev/null 2>&1; then
    $python -m venv --system-site-packages .venv-gpu
    python=.venv-gpu/bin/python
    $python -m pip install --quiet --no-index --find-links wheels taichi pytest scipy
fi
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec timeout 490 $python bench/device.py --arch "$arch" --output "$output" "${@:3}"

#!/usr/bin/env bash
# The tests and the table of docs/performance_appendix.md on a GPU. Needs no network: what it uses has to be installed.
#
#     bench/gpu.sh                          on CUDA, the table goes to gpu.md
#     bench/gpu.sh vulkan figures.md        on another backend of Taichi, to another file
#     bench/gpu.sh cuda gpu.md sphere       some of the programs only
set -euo pipefail

export TI_ARCH=${1:-cuda} # Taichi takes it for whatever ti.init asks for
output=$(realpath -m "${2:-gpu.md}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python bench/table.py --no-peers --markdown "$output" ${3:+--cases "${@:3}"}
python -m pytest -q -p no:cacheprovider --arch "$TI_ARCH"

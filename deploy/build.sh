#!/bin/bash
# Configures and builds a preset: build.sh [PRESET] [TARGET...]. Programs land in build/PRESET/bin.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-cpu}
[ $# -gt 0 ] && shift
log=$(cmake --preset "$preset" 2>&1) || { echo "$log" >&2; exit 1; }
cmake --build --preset "$preset" ${1:+--target "$@"}

#!/bin/bash
# Builds the cpu preset and runs every test: run_tests.sh [CTEST ARGUMENTS].
set -euo pipefail
cd "$(dirname "$0")/.."
deploy/build.sh cpu
# Tests start engines of several processes: on two cores more than two at a time only wait.
ctest --preset cpu --parallel 2 "$@"

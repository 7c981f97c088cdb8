#!/bin/bash
# Configures and builds a preset: build.sh [PRESET] [TARGET...]. Programs land in build/PRESET/bin.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-cpu}
[ $# -gt 0 ] && shift
cmake --preset "$preset" >"/tmp/zipage-configure-$$.log" 2>&1 || {
  cat "/tmp/zipage-configure-$$.log" >&2
  rm -f "/tmp/zipage-configure-$$.log"
  exit 1
}
rm -f "/tmp/zipage-configure-$$.log"
cmake --build --preset "$preset" ${1:+--target "$@"}

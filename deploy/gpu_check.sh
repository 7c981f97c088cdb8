#!/bin/bash
# Checks a CUDA build where there is a device: deploy/gpu_check.sh BUNDLE [tests] [memcheck] [racecheck] [bench]
# BUNDLE is what deploy/bundle.sh made of kernels_cuda_test, worker_cuda_test and cuda_bench (those
# that are missing are left out, loudly). Without further words does all of it, correctness first.
# Needs compute-sanitizer for the checks, and CUDA's own libraries on the system or in Python's packages.
set -uo pipefail
[ $# -ge 1 ] || { echo "usage: deploy/gpu_check.sh BUNDLE [tests] [memcheck] [racecheck] [bench]" >&2; exit 2; }
bundle=$1; shift
steps=${*:-tests memcheck racecheck bench}
failed=0

# cuBLASLt: the loader's own paths, the toolkit's, or those of the nvidia-cublas package.
if ! ldconfig -p | grep -q 'libcublasLt\.so\.13'; then
  for dir in /usr/local/cuda/lib64 $(python3 -c 'import sysconfig, glob
print(*glob.glob(sysconfig.get_paths()["purelib"] + "/nvidia/*/lib"))' 2>/dev/null); do
    [ -e "$dir/libcublasLt.so.13" ] && export LD_LIBRARY_PATH=$dir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} && break
  done
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader

run() {  # NAME COMMAND...
  local name=$1 start=$SECONDS; shift
  "$@" > /tmp/gpu_check.log 2>&1
  local status=$?
  if [ $status -eq 0 ]; then
    grep -E 'SKIPPED|ERROR SUMMARY|^\[  PASSED' /tmp/gpu_check.log | sort | uniq -c
    echo "ok: $name ($((SECONDS - start)) s)"
  else
    grep -vE '^\[ RUN|^\[       OK' /tmp/gpu_check.log | head -80
    echo "FAILED: $name (exit $status, $((SECONDS - start)) s)"
    failed=1
  fi
}

for step in $steps; do
  for test in kernels_cuda_test worker_cuda_test; do
    program=$bundle/bin/$test
    [ "$step" = bench ] && break
    [ -e "$program" ] || { echo "MISSING: $program"; failed=1; continue; }
    case $step in
      tests) run "$test" "$program" --gtest_brief=0 ;;
      # The sanitizer slows kernels down a hundred times: the cases that only add size are left out.
      memcheck | racecheck)
        run "$step $test" compute-sanitizer --tool "$step" --error-exitcode 9 --kernel-name-exclude kns=cutlass \
          "$program" --gtest_filter="${SANITIZER_FILTER:--*Large*:*Long*:*Repeated*:*CuttingAPrompt*:*Greedy*}" ;;
      *) echo "there is no step $step" >&2; exit 2 ;;
    esac
  done
  if [ "$step" = bench ]; then "$bundle/bin/cuda_bench" ${BENCH:-} || failed=1; fi
done
exit $failed

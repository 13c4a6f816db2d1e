#!/usr/bin/env bash
# Builds the GPU kernels, checks them against float64, runs compute-sanitizer over them and times them beside PyTorch.
#   scripts/gpu_check.sh RESULTS_FOLDER [CMake options]
# Needs a GPU, nvcc, cmake, ninja and a python3 with PyTorch; CUTLASS as third_party/cutlass finds it.
# Seconds for the random problems: CHECK_SECONDS (60); for each sanitizer: SANITIZER_SECONDS (30).
set -euo pipefail
results=$(realpath -m "$1")
shift
cd "$(dirname "$0")/.."
mkdir -p "$results"
build=${BUILD_DIR:-build/gpu}

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFLASHSDK_CUDA=ON "$@" >"$results/configure.txt"
start=$SECONDS
cmake --build "$build" --target flashsdk_gpu_harness -v >"$results/build.txt" 2>&1 ||
  { grep -m5 -i 'error' "$results/build.txt"; exit 1; }
python3 tests/cpp/gpu/registers.py "$results/build.txt" >"$results/registers.txt"
echo "build: $((SECONDS - start)) s, $(wc -l <"$results/registers.txt") kernels" | tee "$results/summary.txt"

library=$build/libflashsdk_gpu_harness.so
status=0
python3 tests/cpp/gpu/check_kernels.py "$library" --count 100000 --seconds "${CHECK_SECONDS:-60}" |
  tee "$results/check.txt" || status=1
for tool in memcheck racecheck synccheck; do
  echo "$tool" | tee -a "$results/sanitizer.txt"
  timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 1 python3 tests/cpp/gpu/check_kernels.py "$library" \
    --count 100000 --seconds "${SANITIZER_SECONDS:-30}" --seed 100000 2>&1 | tail -4 | tee -a "$results/sanitizer.txt" || status=1
done
python3 tests/cpp/gpu/bench_kernels.py "$library" --csv "$results/bench.csv" | tee "$results/bench.txt" || status=1
exit $status

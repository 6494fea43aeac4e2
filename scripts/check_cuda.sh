#!/bin/bash
# Build the CUDA kernels on a machine with a GPU, then benchmark, test and sanitize them.
#
#   scripts/check_cuda.sh [stage ...]     stages: build attention generate tests sanitize; all of them by default
#
# Run in the repository root. What is written goes to $OUT (default outputs/cuda): check.log, attention/ and
# generate/ (results.json and a picture each). After LIMIT seconds (default 590) no stage goes on, so where a
# command may take ten minutes, ask for a few stages at a time: "build attention tests", "generate", "sanitize".
# DEVICE, PRESET, CONTEXT (tokens of one layer), PROMPT (tokens of generate), BATCH (rows of both) and LAYERS (of
# the model that generates) shorten it.
set -u
STAGES="build attention generate tests sanitize"
: "${OUT:=outputs/cuda}" "${LIMIT:=590}" "${DEVICE:=cuda}" "${PRESET:=llama3-8b}" "${PYTHON:=python3}"
: "${CONTEXT:=32768}" "${PROMPT:=16384}" "${BATCH:=8}"
for name in "$@"; do
  case " $STAGES " in *" $name "*) ;; *) echo "no stage '$name'; there are: $STAGES" >&2; exit 2 ;; esac
done
[ $# -eq 0 ] && set -- $STAGES

[ -d kvcache_plugins ] || { echo "run this in the root of the repository" >&2; exit 2; }
"$PYTHON" -c "import torch; raise SystemExit(not torch.cuda.is_available())" || {
  echo "$PYTHON has no torch that sees a GPU" >&2; exit 2; }
export KVCACHE_CUDA_KERNELS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PATH=${CUDA_HOME:-/usr/local/cuda}/bin:$PATH
mkdir -p "$OUT"
LOG=$OUT/check.log
failed=0
: > "$LOG"

# run NAME SECONDS LINES command...: everything is logged, the last lines are shown
run() {
  local name=$1 limit=$2 lines=$3 begun=$SECONDS part code
  shift 3
  local left=$((LIMIT - SECONDS))
  [ "$left" -lt 15 ] && { echo "== $name: no time left"; failed=1; return; }
  [ "$left" -lt "$limit" ] && limit=$left
  part=$(mktemp)
  timeout "$limit" "$@" > "$part" 2>&1
  code=$?
  [ "$code" -ne 0 ] && failed=1
  { echo "== $name: status $code, $((SECONDS - begun)) s"; cat "$part"; } >> "$LOG"
  echo "== $name: status $code, $((SECONDS - begun)) s"
  tail -n "$lines" "$part"
  rm -f "$part"
}

build() {
  run build 200 20 env -u KVCACHE_CUDA_KERNELS "$PYTHON" -c "
import time, torch
from kvcache_plugins.kernels import cuda_loader
started = time.time()
print(cuda_loader.build(), round(time.time() - started, 1), 's to build')
started = time.time()
serve = cuda_loader.try_load(torch.device('cuda', 0))
print('check passed:', serve, round(time.time() - started, 1), 's')
print(cuda_loader.status())
raise SystemExit(not serve)"
}

attention() {
  run attention 300 80 "$PYTHON" scripts/benchmark.py attention --device "$DEVICE" --preset "$PRESET" \
    --dtype bf16 --batch_sizes 1 "$BATCH" --lengths "$CONTEXT" --output "$OUT/attention" --cache_config \
    '{"backend": "int8"}' '{"backend": "int4"}' '{"backend": "float8"}' \
    '{"backend": "kivi", "nbits": 4}' '{"backend": "kivi", "nbits": 4, "q_group_size": 64}' \
    '{"backend": "kivi", "nbits": 2}' \
    '{"backend": "kivi", "nbits": 4, "rope_mode": "block"}' \
    '{"backend": "kivi", "nbits": 4, "q_group_size": 64, "rope_mode": "block"}' \
    '{"backend": "kivi", "nbits": 2, "rope_mode": "block"}' \
    '{"backend": "kvquant", "nbits": 4, "calibration": "normal_float"}'
}

generate() {
  run generate 570 40 "$PYTHON" scripts/benchmark.py generate --device "$DEVICE" --preset "$PRESET" \
    --dtype bf16 --batch_sizes "$BATCH" --lengths "$PROMPT" --max_new_tokens 48 --output "$OUT/generate" \
    ${LAYERS:+--num_layers "$LAYERS"} --cache_config '{"backend": "int8"}' '{"backend": "int4"}' '{"backend": "float8"}' \
    '{"backend": "kivi", "nbits": 4}' '{"backend": "kivi", "nbits": 2}' \
    '{"backend": "kivi", "nbits": 4, "rope_mode": "block"}'
}

tests() {
  export KVCACHE_REQUIRE_CUDA=1
  run tests 300 25 "$PYTHON" -m pytest -m cuda -q --maxfail=10 -p no:cacheprovider \
    tests/kernels/cuda/test_device.py tests/models/test_generation_on_a_gpu.py \
    tests/evaluation/test_benchmark_device.py tests/retaining/test_heads.py
}

sanitize() {
  local tool library
  library=$("$PYTHON" -c "from kvcache_plugins.kernels import cuda_loader; print(cuda_loader.build())" | tail -n 1)
  if [ ! -f "$library" ]; then echo "== sanitize: there is no build"; failed=1; return; fi
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1  # a stray access then leaves an allocation
  for tool in memcheck racecheck synccheck initcheck; do
    # torch's own kernels are left alone: they are many, and each would take its time to instrument; but what they
    # write must be seen to have been written
    local chosen=(--kernel-name kernel_substring=kvcache)
    [ "$tool" = initcheck ] && chosen=()
    run "$tool" 180 8 compute-sanitizer --tool "$tool" "${chosen[@]}" --error-exitcode 9 \
      "$PYTHON" -m kvcache_plugins.kernels.cuda_trial "$library"
  done
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader
"$PYTHON" -c "import torch, transformers; print(torch.__version__, torch.version.cuda, transformers.__version__)"
for name in "$@"; do "$name"; done
echo "total $SECONDS s"
exit "$failed"

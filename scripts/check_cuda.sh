#!/bin/bash
# Build the CUDA kernels on a machine with a GPU, then benchmark, test and sanitize them.
#
#   scripts/check_cuda.sh [stage ...]
#
# Stages are build, attention, heads (attention of 64 and of 256 channels), generate, compiled, tests and sanitize; all
# of them by default.
#
# Run in the repository root. What is written goes to $OUT (default outputs/cuda): check.log, and results.json with a
# picture in attention_1/, attention_$BATCH/, heads_PRESET/, generate/ and compiled/. After LIMIT seconds (default 590)
# no stage goes on, so where a command may take ten minutes, ask for a few stages at a time: "build attention tests",
# "heads", "generate", "compiled", "sanitize".
# Where the build's check finds formats that deviate, the others are measured and tested all the same; where a kernel
# breaks, memcheck tells of it at once, and nothing else is run. Nothing at all is run where nothing could be built.
# DEVICE, PRESET, CONTEXT (tokens of one layer), PROMPT (tokens of generate), BATCH (rows of both) and LAYERS (of
# the model that generates) shorten it.
set -u
STAGES="build attention heads generate compiled tests sanitize"
: "${OUT:=outputs/cuda}" "${LIMIT:=590}" "${DEVICE:=cuda}" "${PRESET:=llama3-8b}" "${PYTHON:=python3}"
: "${CONTEXT:=32768}" "${PROMPT:=16384}" "${BATCH:=8}"
for name in "$@"; do
  case " $STAGES " in *" $name "*) ;; *) echo "no stage '$name'; there are: $STAGES" >&2; exit 2 ;; esac
done
[ $# -eq 0 ] && set -- $STAGES

[ -d kvcache_plugins ] || { echo "run this in the root of the repository" >&2; exit 2; }
"$PYTHON" -c "import torch; raise SystemExit(not torch.cuda.is_available())" || {
  echo "$PYTHON has no torch that sees a GPU" >&2; exit 2; }
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
export KVCACHE_CUDA_KERNELS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export PYTHONPATH=$PWD:$WORK${PYTHONPATH:+:$PYTHONPATH} PATH=${CUDA_HOME:-/usr/local/cuda}/bin:$PATH
mkdir -p "$OUT"
LOG=$OUT/check.log
DEVIATES=3 # status of a build whose check found deviations
NO_BUILD=4 # of one that failed
failed=0
kernels=right # or: deviate, broken, missing
: > "$LOG"

# Uses kernels whatever their check found: "python -m kvcache_unchecked SCRIPT ...", or as a plugin of pytest.
cat > "$WORK/kvcache_unchecked.py" << 'PYTHON'
import runpy, sys
from kvcache_plugins.kernels import cuda_loader


def unchecked(device):
    cuda_loader.build()
    cuda_loader._checked.add(cuda_loader._index(device))


cuda_loader.check = unchecked
if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
PYTHON

# run NAME SECONDS LINES command...: everything is logged, the last lines are shown; $status is how it ended, and $part
# holds what it printed
run() {
  local name=$1 limit=$2 lines=$3 begun=$SECONDS
  shift 3
  local left=$((LIMIT - SECONDS))
  [ "$left" -lt 15 ] && { echo "== $name: no time left"; failed=1; status=1; return; }
  [ "$left" -lt "$limit" ] && limit=$left
  part=$WORK/output.$BASHPID
  timeout -s INT -k 10 "$limit" "$@" > "$part" 2>&1 # interrupted, Python says where it was, and pytest what failed
  status=$?
  [ "$status" -ne 0 ] && failed=1
  { echo "== $name: status $status, $((SECONDS - begun)) s"; cat "$part"; } >> "$LOG"
  echo "== $name: status $status, $((SECONDS - begun)) s"
  tail -n "$lines" "$part"
}

build() {
  run build 200 60 env -u KVCACHE_CUDA_KERNELS "$PYTHON" -c "
import time, torch, traceback
from kvcache_plugins.kernels import cuda_check, cuda_loader
started = time.time()
try:
    print(cuda_loader.build(), round(time.time() - started, 1), 's to build')
except Exception:
    traceback.print_exc()
    raise SystemExit($NO_BUILD)
started, device = time.time(), torch.device('cuda', 0)
serve = cuda_loader.try_load(device)
print('check passed:', serve, round(time.time() - started, 1), 's')
print(cuda_loader.status())
if not serve:
    print(*cuda_check.find_deviations(device), sep='\n')
    raise SystemExit($DEVIATES)"
  case $status in
    0) ;;
    "$DEVIATES") kernels=deviate ;;
    "$NO_BUILD") kernels=missing ;;
    *) kernels=broken; library && sanitizer memcheck 200 ;;
  esac
}

# serve NAME: whether a stage may be run with these kernels
serve() {
  case $kernels in broken | missing) echo "== $1: not run, as the kernels are $kernels"; failed=1; return 1 ;; esac
  return 0
}

# layer NAME DIR option...: the benchmark of one layer
layer() {
  local script=(scripts/benchmark.py) name=$1 to=$OUT/$2
  shift 2
  [ "$kernels" = deviate ] && script=(-m kvcache_unchecked scripts/benchmark.py)
  run "$name" 200 40 "$PYTHON" "${script[@]}" attention --device "$DEVICE" --dtype bf16 --lengths "$CONTEXT" \
    --output "$to" "$@"
}

attention() {
  serve attention || return
  local batch
  for batch in 1 "$BATCH"; do # what one finds stays if the other fails
    layer "attention, batch of $batch" "attention_$batch" --preset "$PRESET" --batch_sizes "$batch" --cache_config \
      '{"backend": "int8"}' '{"backend": "int4"}' '{"backend": "float8"}' \
      '{"backend": "kivi", "nbits": 4}' '{"backend": "kivi", "nbits": 4, "q_group_size": 64}' \
      '{"backend": "kivi", "nbits": 2}' \
      '{"backend": "kivi", "nbits": 4, "rope_mode": "block"}' \
      '{"backend": "kivi", "nbits": 4, "q_group_size": 64, "rope_mode": "block"}' \
      '{"backend": "kivi", "nbits": 2, "rope_mode": "block"}' \
      '{"backend": "kvquant", "nbits": 4, "calibration": "normal_float"}' \
      '{"backend": "kvquant", "nbits": 3, "calibration": "normal_float"}' \
      '{"backend": "kvquant", "nbits": 2, "calibration": "normal_float"}'
  done
}

heads() {
  serve heads || return
  local preset
  for preset in llama3.2-1b gemma2-9b; do # their layers of full attention
    layer "heads of $preset" "heads_$preset" --preset "$preset" --batch_sizes 1 "$BATCH" --cache_config \
      '{"backend": "int8"}' '{"backend": "int4"}' '{"backend": "int4", "sink_length": 4}' \
      '{"backend": "kivi", "nbits": 4}' '{"backend": "kivi", "nbits": 2}'
  done
}

# generation NAME option...: generate() with the dense cache and with those of the options
generation() {
  local name=$1
  shift
  serve "$name" || return
  [ "$kernels" = deviate ] && { echo "== $name: not run, as the kernels deviate"; failed=1; return; }
  run "$name" 570 40 "$PYTHON" scripts/benchmark.py generate --device "$DEVICE" --preset "$PRESET" \
    --dtype bf16 --batch_sizes "$BATCH" --lengths "$PROMPT" --max_new_tokens 48 --output "$OUT/$name" \
    ${LAYERS:+--num_layers "$LAYERS"} "$@"
}

generate() {
  generation generate --time_limit 100 --cache_config \
    '{"backend": "int8"}' '{"backend": "int4"}' '{"backend": "float8"}' \
    '{"backend": "kivi", "nbits": 4}' '{"backend": "kivi", "nbits": 2}' \
    '{"backend": "kivi", "nbits": 4, "rope_mode": "block"}'
}

compiled() {
  generation compiled --compile reduce-overhead --time_limit 180 --cache_config \
    '{"backend": "int8"}' '{"backend": "kivi", "nbits": 4}'
}

tests() {
  serve tests || return
  local plugin=() workers=()
  [ "$kernels" = deviate ] && plugin=(-p kvcache_unchecked)
  "$PYTHON" -c "import xdist" 2> "$WORK/none" && workers=(-n 4) # it is Python that they wait for
  run tests 400 60 env KVCACHE_REQUIRE_CUDA=1 "$PYTHON" -m pytest -m cuda -v --tb=short --durations=15 --maxfail=60 \
    -p no:cacheprovider ${workers[@]+"${workers[@]}"} ${plugin[@]+"${plugin[@]}"} tests/kernels/cuda/test_device.py tests/kernels/cuda/test_waiting.py \
    tests/attention/test_unpacked.py tests/evaluation/test_benchmark_device.py tests/retaining/test_heads.py \
    tests/models/test_generation_on_a_gpu.py tests/models/test_generation_on_two_gpus.py
}

# library: the build, in $library
library() {
  run library 200 1 "$PYTHON" -c "from kvcache_plugins.kernels import cuda_loader; print(cuda_loader.build())"
  library=$(tail -n 1 "$part")
  [ -f "$library" ] || { echo "== there is no build"; failed=1; return 1; }
}

# sanitizer TOOL SECONDS: the check of the kernels under a tool of compute-sanitizer
sanitizer() {
  # torch's own kernels are left alone: they are many, and each would take its time to instrument; but what they
  # write must be seen to have been written. What the driver refuses torch is its affair.
  local options=(--error-exitcode 9)
  [ "$1" = initcheck ] || options+=(--kernel-name kernel_substring=kvcache)
  [ "$1" = memcheck ] && options+=(--report-api-errors no)
  # without torch's cache of memory, a stray access leaves an allocation
  run "$1" "$2" 30 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" "${options[@]}" \
    "$PYTHON" -m kvcache_plugins.kernels.cuda_trial "$library"
}

# All tools at once, which takes as long as the slowest; each with a log of its own, so that they are told in order.
sanitize() {
  [ "$kernels" = missing ] && { serve sanitize; return; }
  library || return
  local tool process tools="memcheck racecheck synccheck initcheck" processes=()
  for tool in $tools; do
    (LOG=$WORK/$tool.log failed=0; sanitizer "$tool" 180 > "$WORK/$tool.shown"; exit "$failed") &
    processes+=($!)
  done
  for process in "${processes[@]}"; do wait "$process" || failed=1; done
  for tool in $tools; do
    cat "$WORK/$tool.shown"
    cat "$WORK/$tool.log" >> "$LOG"
  done
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader
"$PYTHON" -c "import torch, transformers; print(torch.__version__, torch.version.cuda, transformers.__version__)"
for name in "$@"; do "$name"; done
echo "total $SECONDS s"
exit "$failed"

#!/bin/bash
# Build the CUDA kernels on a machine with a GPU, check, benchmark, test and sanitize them, in under ten minutes.
# Run in the repository root: scripts/check_cuda.sh; logs and benchmark.json go to $OUT (default outputs/cuda).
set -u
: "${OUT:=outputs/cuda}"; mkdir -p "$OUT"
export KVCACHE_CUDA_KERNELS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export PATH=${CUDA_HOME:-/usr/local/cuda}/bin:$PATH
small=$(mktemp --suffix .py)
python3 -c "import kvcache_plugins" 2>/dev/null || export PYTHONPATH=$PWD
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader
python3 -c "import torch, transformers; print(torch.__version__, torch.version.cuda, transformers.__version__)"
stage() { local name=$1 limit=$2; shift 2; local t=$SECONDS
  [ $SECONDS -gt 530 ] && { echo "== $name: no time left"; return; }
  [ $((590 - SECONDS)) -lt $limit ] && limit=$((590 - SECONDS))
  timeout "$limit" "$@" > "$OUT/$name.log" 2>&1; local rc=$?
  echo "== $name: rc $rc, $((SECONDS - t)) s"; tail -n "${LINES_OF:-12}" "$OUT/$name.log"; }
LINES_OF=20 stage build 180 python3 -c "
import time, torch
from kvcache_plugins.kernels import cuda_loader
t = time.time(); print(cuda_loader.build()); print('build s', round(time.time() - t, 1))
t = time.time(); print('check', cuda_loader.try_load(torch.device('cuda', 0)), round(time.time() - t, 1), 's'); print(cuda_loader.status())"
LINES_OF=30 stage benchmark 140 python3 scripts/benchmark_cuda.py --preset llama3-8b --batch_sizes 1 8 --lengths 32768 --output "$OUT/benchmark.json"
LINES_OF=25 KVCACHE_REQUIRE_CUDA=1 stage tests 170 python3 -m pytest tests/kernels/cuda/test_device.py -m cuda -q --maxfail=10 -p no:cacheprovider
cat > "$small" <<'PY'
import torch
from kvcache_plugins.kernels import cuda_loader, cuda_check
cuda_loader.build()
with torch.inference_mode():
    for dtype in (torch.bfloat16, torch.float32):
        for i, sample in enumerate(cuda_check.samples(dtype, 128, blocks=6)):
            if i in (0, 1, 4, 12):
                print(sample.name, cuda_check._attention_deviation(sample, dtype, torch.device("cuda", 0)), cuda_check._tokens_deviation(sample.to(torch.device("cuda", 0))))
PY
LINES_OF=8 stage memcheck 60 compute-sanitizer --tool memcheck python3 "$small"
LINES_OF=8 stage racecheck 60 compute-sanitizer --tool racecheck python3 "$small"
LINES_OF=8 stage initcheck 60 compute-sanitizer --tool initcheck python3 "$small"
echo "total $SECONDS s"

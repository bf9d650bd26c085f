#!/usr/bin/env bash
# Throughput in vLLM at 7B on one large GPU: as it is, with its own EVS, and with mmaccel at 25 and 10 %, pictures and clips,
# 1 to 32 clients. Wants vllm 0.32 or 0.33 and mmaccel, the model in the Hugging Face cache or the hub, and 80 GB for three engines.
#
#   benchmarks/serving/gpu.sh [FOLDER]      PYTHON=python3.12 MODEL=./my-qwen benchmarks/serving/gpu.sh report
#
# Samples are written as they come; the same command goes on where it was stopped.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:-vllm-report}
mkdir -p "$out"
"${PYTHON:-python3}" "$root/benchmarks/serving/throughput.py" --model "${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}" --memory 0.3 \
    --clients 1 2 8 32 --each 4 --answer 32 --rounds 3 --out "$out/vllm-7b.json" | tee "$out/vllm-7b.md"

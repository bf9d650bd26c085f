#!/usr/bin/env bash
# vLLM with mmaccel on one large GPU, in ten minutes at most. First the answers of the shipped models under vLLM's default model
# runner (V2 on GPUs): kept positions, clips, several pictures, chunked prefill, preemption, and a second pass over the caches.
# Then throughput at 7B: as it is, with its own EVS, and with mmaccel at 25 and 10 %, for pictures and clips. Wants vllm 0.32 or
# 0.33, mmaccel and pytest, the model in the Hugging Face cache or the hub, and 80 GB for three engines.
#
#   benchmarks/serving/gpu.sh [FOLDER]      PYTHON=python3.12 MODEL=./my-qwen benchmarks/serving/gpu.sh report
#
# FOLDER gets answers.txt, vllm-7b.json and vllm-7b.md, the table. Samples are written as they come; the same command continues.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mkdir -p "${1:-vllm-report}" && cd "${1:-vllm-report}" && pwd) || exit 2
python=${PYTHON:-python3}
cd "$root" || exit 2
export OMP_NUM_THREADS=4

answers=(tests/vllm_plugin/test_served.py tests/vllm_plugin/test_engine.py)
timeout 200 "$python" -m pytest -q -m vllm -n 0 -p no:cacheprovider "${answers[@]}" 2>&1 | tee "$out/answers.txt"
status=${PIPESTATUS[0]}
[ "$status" = 0 ] || echo "Answers differ or were not all compared (exit status $status); see $out/answers.txt."
"$python" benchmarks/serving/throughput.py --model "${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}" --memory 0.3 --clients 1 4 32 --each 2 \
    --answer 32 --rounds 2 --minutes 6 --out "$out/vllm-7b.json" | tee "$out/vllm-7b.md" || status=1
exit "$status"

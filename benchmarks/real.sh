#!/usr/bin/env bash
# Qwen2.5-VL-3B and LLaVA-OneVision-0.5B on MMStar, TextVQA, POPE, ChartQA and 300 questions of Video-MME through lmms-eval: bare by
# its own wrappers, with `balanced`, and with three more recipes. For a machine with a GPU and access to the hub:
#
#   benchmarks/lmms/environment.sh build/lmms-eval
#   PYTHON=build/lmms-eval/bin/python benchmarks/real.sh [--dry-run] [--list] [--update PAGE] [FOLDER]
#
# What is finished lies in FOLDER/MODEL/RECIPE/TASK and is not run again, so that the same command goes on after any stop; a run
# that fails does not stop the others, and the exit status then is 1. A recipe that `mmaccel tune` found is measured too if it
# lies in FOLDER/MODEL/tuned.json (MODEL: qwen2.5-vl-3b or llava-onevision-0.5b):
#
#   mmaccel tune --model Qwen/Qwen2.5-VL-3B-Instruct --data questions.jsonl --keep 0.99 -o real/qwen2.5-vl-3b/tuned.json
#
# --list says which runs are left; --dry-run goes through all of it with a shipped model and the local task, on a CPU.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" "$root/benchmarks/lmms/real.py" "$@"

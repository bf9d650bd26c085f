#!/usr/bin/env bash
# What one large GPU says about mmaccel, in ten minutes at most: decoding, the kernels, 7B shapes under real workloads, and the
# accuracy of the models that come with mmaccel; first whether every kernel is right here, then what was never measured. Leaves JSON and plots in FOLDER.
#
#   benchmarks/gpu_report.sh [--dry-run] [FOLDER]      PYTHON=python3.12 benchmarks/gpu_report.sh report
#
# Needs torch, triton, transformers and Pillow; plots want matplotlib, the accuracy torchvision, and times of video decoding PyAV,
# and what is missing is left out with a sentence. --dry-run goes through all of it at tiny shapes and with one model, on a CPU
# too. A step that fails does not stop the others; the exit status then is 1. Results are written as they come, so what time cuts
# short is kept.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
dry="" folder=gpu-report
for given in "$@"; do
  case $given in
    --dry-run) dry=yes ;;
    -*) echo "gpu_report.sh knows --dry-run and a folder, not '$given'." >&2; exit 2 ;;
    *) folder=$given ;;
  esac
done
out=$(mkdir -p "$folder" && cd "$folder" && pwd) || exit 2
python=${PYTHON:-python3}
export PYTHONPATH="$root:$root/kernels" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
seconds=580
failed=0
cd "$root" || exit 2

has() { "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)"; }

# step NAME SECONDS COMMAND...: so many seconds at most, and what is left of the time
step() {
  local name=$1 most=$2 left=$((seconds - SECONDS)) status
  shift 2
  printf '\n=== %s (%ss)\n' "$name" "$SECONDS"
  if [ -z "$dry" ] && [ "$left" -lt 15 ]; then
    echo "left out: the ten minutes are over"
    return
  fi
  [ "$left" -lt "$most" ] && most=$left
  if [ -n "$dry" ]; then "$@"; else timeout "$most" "$@"; fi
  status=$?
  if [ "$status" = 124 ]; then
    echo "$name: cut short, since its share of the ten minutes is over; what was finished is in the folder"
  elif [ "$status" != 0 ]; then
    echo "$name: FAILED with exit status $status"
    failed=1
  fi
}

bench() {
  local shape=$1
  shift
  local plots=(--plots "$out/plots-$shape")
  has matplotlib || plots=()
  step "bench $shape" 100 "$python" -m mmaccel bench --shape "$shape" "$@" --json "$out/bench-$shape.json" "${plots[@]}"
}

has matplotlib || echo "No plots: matplotlib is not installed."
has av || echo "Video decoding is not timed: PyAV is not installed."
if [ -n "$dry" ]; then
  step "kernels beside their definitions" 0 "$python" benchmarks/kernels.py --dry-run --check --out "$out/kernels-checked.json"
  step decode 0 "$python" benchmarks/decode.py --dry-run --out "$out/decode.json"
  step kernels 0 "$python" benchmarks/kernels.py --dry-run --out "$out/kernels.json"
  bench tiny --workload picture-336 video-32 --recipe divprune fastv --retain 0.25 --max-new-tokens 4 --repeats 1
else
  step "kernels beside their definitions" 90 "$python" benchmarks/kernels.py --check --out "$out/kernels-checked.json"
  decode=("$python" benchmarks/decode.py --shape qwen2.5-vl-7b)
  step "decode attention" 80 "${decode[@]}" --kernel --keys 1024 4096 16384 65536 262144 --batch 1 16 --out "$out/decode-kernels.json"
  some=(--recipe none balanced snapkv kivi h2o-decode --keys 1024 16384 --batch 1 8 --repeats 3)
  step "decode steps" 180 "${decode[@]}" "${some[@]}" --out "$out/decode.json"
  step kernels 60 "$python" benchmarks/kernels.py --out "$out/kernels.json"
  bench llava-1.5-7b --workload picture-336 --recipe divprune visionzip fastv snapkv --retain 0.25 --max-new-tokens 32 --repeats 5
  bench llava-onevision-7b --workload video-32 video-128 --recipe divprune holitom fastvid --retain 0.1 --max-new-tokens 32 --repeats 3
  bench qwen2.5-vl-7b --workload tiles-2880 video-128 --recipe divprune fastv kivi --retain 0.25 --max-new-tokens 32 --repeats 3
  bench llava-next-7b --workload tiles-2880 --concurrency 1 4 16 --recipe divprune --retain 0.25 --max-new-tokens 16 --repeats 2
fi
if has torchvision; then
  limit=(--retain 0.5 0.25 0.1 --limit 20 --batch-size 60)
  [ -n "$dry" ] && limit=(--retain 0.25 --suite colour --limit 2 --batch-size 2)
  for folder in mmaccel/models/*/ packages/mmaccel-models/mmaccel_models/*/; do
    [ -f "$folder/processor_config.json" ] || [ -f "$folder/chat_template.jinja" ] || continue
    name=$(basename "$folder")
    step "eval $name" 60 "$python" -m mmaccel eval --model "$folder" --recipe balanced "${limit[@]}" --json "$out/eval-$name.json"
    [ -n "$dry" ] && break
  done
else
  echo "The accuracy of the shipped models is left out: torchvision is not installed."
fi
printf '\n%s seconds, results in %s\n' "$SECONDS" "$out"
exit "$failed"

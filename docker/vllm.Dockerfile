# vLLM with mmaccel as its plug-in. In the folder of the checkout:
#
#   docker build -f docker/vllm.Dockerfile -t mmaccel-vllm .
#   docker run --gpus all --ipc host -p 127.0.0.1:8000:8000 -v mmaccel-models:/root/.cache/huggingface mmaccel-vllm \
#       Qwen/Qwen2.5-VL-7B-Instruct --hf-overrides '{"mmaccel": {"recipe": "divprune", "retain": 0.25}}'
FROM vllm/vllm-openai:v0.33.0

COPY pyproject.toml hatch_build.py README.md LICENSE /source/
COPY mmaccel /source/mmaccel
COPY kernels /source/kernels
COPY demo /source/demo
# the extra keeps the vLLM of the image, or fails
RUN uv pip install --system --no-cache "/source[vllm]" "vllm==0.33.0" && rm -r /source

EXPOSE 8000
ENTRYPOINT ["vllm", "serve"]

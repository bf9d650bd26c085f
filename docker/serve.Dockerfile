# `mmaccel serve`, an OpenAI-compatible server on transformers. In the folder of the checkout:
#
#   docker build -f docker/serve.Dockerfile -t mmaccel-serve .
#   docker run --gpus all -p 127.0.0.1:8000:8000 -v mmaccel-models:/cache mmaccel-serve \
#       --model Qwen/Qwen2.5-VL-3B-Instruct --recipe snapkv --retain 0.25
#
# Without arguments it serves the shipped mini-llava. Models are downloaded to /cache.
FROM python:3.12-slim

# Triton compiles a launcher for its kernels
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml hatch_build.py README.md LICENSE /source/
COPY mmaccel /source/mmaccel
COPY kernels /source/kernels
COPY demo /source/demo
RUN pip install --no-cache-dir "/source[serve,video]" && rm -r /source

RUN useradd --create-home mmaccel && mkdir /cache && chown mmaccel /cache
USER mmaccel
WORKDIR /home/mmaccel
ENV HF_HOME=/cache
EXPOSE 8000
ENTRYPOINT ["mmaccel", "serve", "--host", "0.0.0.0", "--port", "8000"]

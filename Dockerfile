# The environment of ./run.sh setup, for timed runs on GPUs; the checkout comes as a volume:
#   docker build -t train_gpt .
#   docker run --rm --gpus all --ipc=host -v "$PWD:/train_gpt" train_gpt speedrun
# Untested: written without a Docker daemon and without a GPU.
# PyPI's torch, which requirements.txt pins, is a CUDA 13 build that brings its libraries along. The machine
# provides the driver (580 or newer) and the NVIDIA container toolkit.
FROM python:3.11-slim-bookworm

# gcc builds the launchers of Triton's kernels; `record new` asks git which commit has the script
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libc6-dev git \
    && rm -rf /var/lib/apt/lists/* \
    && git config --system --add safe.directory /train_gpt

COPY requirements.txt /opt/requirements.txt
RUN pip install --no-cache-dir -r /opt/requirements.txt

# PYTHON: ./run.sh uses this interpreter as it is and makes no .venv
ENV PYTHON=python \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /train_gpt
ENTRYPOINT ["./run.sh"]

# rlhf_megatron on NVIDIA GPUs. WRITTEN, NOT BUILT: the maintainers had no machine with docker and a GPU at the time of
# writing, so take this file as the list of versions that belong together, and expect to mend details of the build.
#
# Why these versions: vllm 0.32.0 requires exactly torch 2.13.0 (CUDA 13) and transformers >= 5.16.1, < 5.20;
# megatron-core 0.16.1 is tested by its authors with transformer-engine >= 2.9, < 2.12; torch, transformers and
# megatron-core are those of requirements/cpu.txt, on which the tests run. Change one only together with the others.
#
#   docker build -t rlhf_megatron .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -it rlhf_megatron
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu22.04

ARG TORCH=2.13.0
ARG TRANSFORMER_ENGINE=2.11.0
ARG APEX=25.09
ARG VLLM=0.32.0
ARG RAY=2.60.0
# builds of transformer-engine and apex take about 4 GB of memory per job
ARG MAX_JOBS=8

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 MAX_JOBS=${MAX_JOBS} NVTE_FRAMEWORK=pytorch \
    TORCH_CUDA_ARCH_LIST="8.0 9.0 10.0" NVTE_CUDA_ARCHS="80;90;100"

RUN apt-get update && apt-get install -y --no-install-recommends \
        build-essential git ninja-build cmake software-properties-common \
    && add-apt-repository -y ppa:deadsnakes/ppa && apt-get update \
    && apt-get install -y --no-install-recommends python3.11 python3.11-dev python3.11-venv \
    && rm -rf /var/lib/apt/lists/* && python3.11 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

# torch and vLLM first: they decide about CUDA; everything after must not replace them (the constraint file sees to it)
COPY requirements/cpu.txt /tmp/cpu.txt
RUN grep -E '^(torch|transformers|megatron-core|numpy|safetensors|tokenizers|huggingface_hub)==' /tmp/cpu.txt > /opt/constraints.txt
ENV PIP_CONSTRAINT=/opt/constraints.txt
RUN pip install -U pip wheel setuptools==78.1.1 \
    && pip install torch==${TORCH} \
    && pip install vllm==${VLLM}

# compiled against the torch above
RUN pip install --no-build-isolation "transformer-engine[core_cu13,pytorch]==${TRANSFORMER_ENGINE}"
RUN git clone --depth 1 --branch ${APEX} https://github.com/NVIDIA/apex.git /opt/apex \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation /opt/apex && rm -rf /opt/apex

RUN pip install ray==${RAY} megatron-core==0.16.1

WORKDIR /workspace/rlhf_megatron
COPY . .
RUN pip install --no-build-isolation -e ".[dev,ray]"

ENV OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1
CMD ["bash"]

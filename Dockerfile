# megalite for CUDA: `docker build -t megalite .`, then
# `docker run --gpus all --ipc host megalite torchrun --nproc-per-node 8 pretrain_gpt.py ...`.
# PyPI's torch brings CUDA, cuDNN and NCCL along; the host needs its driver and the NVIDIA container toolkit alone.
FROM python:3.12-slim

# Triton compiles its launchers with a C compiler; make and git are for the development targets.
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /megalite
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY megalite megalite
COPY tools tools
COPY examples examples
COPY pretrain_gpt.py ./
RUN python -m pip install --no-cache-dir --constraint constraints.txt torch setuptools \
    && python -m pip install --no-cache-dir --constraint constraints.txt --no-build-isolation --editable '.[all]'

ENV OMP_NUM_THREADS=1
CMD ["megalite", "doctor"]

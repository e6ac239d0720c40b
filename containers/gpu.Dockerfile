# A machine with NVIDIA GPUs, whose driver must support CUDA 12. Not yet built.
#   docker build --platform=linux/amd64 -f containers/gpu.Dockerfile -t jaxrl-llm:gpu .
#   docker run --rm --gpus=all -v "$PWD/runs:/jaxrl_llm/runs" jaxrl-llm:gpu train --config=configs/gspo.py
FROM python:3.12-slim
WORKDIR /jaxrl_llm
COPY . .
# The wheels of JAX bring CUDA. The checkout stays, for its configs and its launcher of sweeps.
RUN pip install --no-cache-dir --constraint constraints/python3.12.txt --editable ".[gpu,hf,tasks,serve]"
ENTRYPOINT ["jaxrl-llm"]
CMD ["--help"]

